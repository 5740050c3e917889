"""Load the model that a text names: a folder, a bundled model, a hub name, `file.py:name` or `package.module:name`.

Names without a colon mean what they mean to `gf.load`. Code runs only if it is named.
"""

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.isolate import quiet, time_limit
from glassformer.errors import nearest
from glassformer.files import model_name
from glassformer.weights import WeightsError, load, load_to_compute
from glassformer.weights.folder import resolve as find_model

CODE = "file.py:name or package.module:name"
GIVE = f"give a model folder, {CODE}"


def resolve(
    text: str, seconds: float | None = None, as_stored: bool = False, adapter: str | None = None
) -> tuple[Any, str]:
    """Return the model that a text names, and its display name. Raises CannotExamineError or WeightsError.

    Weights are loaded to compute with them (see `load_to_compute`), or with `as_stored` in the dtype of the file.
    `adapter` is the folder of an adapter that is merged into a model that is loaded from files.
    """
    place, _, name = text.rpartition(":")
    if Path(text).is_dir() or not place or not name:
        return _loaded(text, as_stored, adapter)
    if adapter is not None:
        raise CannotExamineError(f"--adapter {adapter} is for a model folder, and {text} is code: leave it out.")
    with time_limit(seconds, f"importing {place}"), quiet():
        module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
        return _built(_attribute(module, name, place), text), text


def _loaded(text: str, as_stored: bool, adapter: str | None) -> tuple[Any, str]:
    if text.endswith(".py"):
        raise CannotExamineError(f"{text} is a file of code, not a model: name the model in it, such as {text}:build.")
    try:
        folder = find_model(text)
    except WeightsError as error:
        if Path(text).exists() or str(error).endswith("?"):  # it ends with the name that is meant
            raise
        raise WeightsError(f"{str(error).rstrip('.')}; or give {CODE}.") from None
    model = (load if as_stored else load_to_compute)(folder, adapter=adapter)
    shown = model_name(text) if Path(text).is_dir() else text
    shown = shown if adapter is None else f"{shown} with the adapter {model_name(adapter)}"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return model, f"{shown} (loaded into glassformer's own engine, {dtype})"


def source_of(text: str, model: Any) -> str:
    """Python code that defines `model` as `resolve` does."""
    place, _, name = text.rpartition(":")
    if Path(text).is_dir() or not place:
        adapter, folder = getattr(getattr(model, "origin", None), "adapter", None), Path(text).expanduser()
        merged = f", adapter={str(adapter)!r}" if adapter is not None and folder.resolve() != adapter.resolve() else ""
        return f"import glassformer\n\nmodel = glassformer.load({text!r}{merged})"
    first, *rest = name.split(".")
    lines, module = [], place
    if place.endswith(".py"):
        file = Path(place)
        module = file.stem
        lines = [f"sys.path.insert(0, {str(file.parent)!r})"]
        if not module.isidentifier():
            made = f"importlib.import_module({module!r}).{name}{_call(text, model)}"
            return f"import importlib\n\n{lines[0]}\nmodel = {made}"
    thing = ".".join([first, *rest])
    return "\n".join([*lines, f"from {module} import {first}", "", f"model = {thing}{_call(text, model)}"])


def _call(text: str, model: Any) -> str:
    """`()` where the name builds the model, nothing where it is the model."""
    name = text.rpartition(":")[2].split(".")[-1]
    same = getattr(model, "__name__", None) == name or not isinstance(model, nn.Module)
    place = text.rpartition(":")[0]
    module = next((m for m in sys.modules.values() if getattr(m, "__file__", None) and _is_place(m, place)), None)
    thing: Any = module
    for part in text.rpartition(":")[2].split("."):
        thing = getattr(thing, part, None)
    return "" if thing is model or (thing is None and same) else "()"


def _is_place(module: ModuleType, place: str) -> bool:
    if not place.endswith(".py"):
        return module.__name__ == place
    return Path(str(module.__file__)).resolve() == Path(place).resolve()


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CannotExamineError(f"{path} does not exist: {GIVE}.")
    # a name of its own: two files of one name, or of an installed module's, stay apart
    spec = importlib.util.spec_from_file_location(f"_glass_{path.stem}_{abs(hash(path.resolve()))}", path)
    if spec is None or spec.loader is None:
        raise CannotExamineError(f"{path} is no Python file: {GIVE}.")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[spec.name] = module  # dataclasses and deep copies look their module up
    _imported(lambda: loader.exec_module(module), str(path), path.resolve().parent)
    return module


def _from_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise CannotExamineError(f"{name} is neither a Python file nor a module: {GIVE}.")
    return _imported(lambda: importlib.import_module(name), name, Path.cwd())


def _imported(run: Callable[[], Any], name: str, folder: Path) -> Any:
    """Import with `folder` on the path; report whatever stops it."""
    sys.path.insert(0, str(folder))
    try:
        return run()
    except (Exception, SystemExit) as error:
        raise CannotExamineError(f"{name} cannot be imported: {_words(error)}.") from None
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _attribute(module: ModuleType, name: str, place: str) -> Any:
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            known = [n for n in vars(thing) if not n.startswith("_")] if hasattr(thing, "__dict__") else []
            hint = nearest(part, known, others="It has:") if known else ""
            raise CannotExamineError(f"{place} has no {name}.{hint}")
        thing = getattr(thing, part)
    return thing


def _built(thing: Any, text: str) -> Any:
    """An instance as it is; a class or a function without required arguments is called; else it is the model itself."""
    if isinstance(thing, nn.Module):
        return thing
    if not callable(thing):
        raise CannotExamineError(
            f"{text}: {type(thing).__name__} cannot be called: name a model, or a function that builds one."
        )
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return thing
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if required and isinstance(thing, type):
        raise CannotExamineError(
            f"{text} needs {', '.join(required)} to be built: name an instance, or a function that builds one."
        )
    if required:
        return thing
    try:
        built = thing()
    except (Exception, SystemExit) as error:
        raise CannotExamineError(f"{text} failed when it was called to build a model: {_words(error)}.") from None
    if not callable(built):
        raise CannotExamineError(
            f"{text} returns {type(built).__name__}: it must return a model, tokens in and logits out."
        )
    return built


def _words(error: BaseException) -> str:
    """What an error says; its kind where it says nothing, or only a name or a number."""
    text = " ".join(str(error).split())[:200].rstrip(".: ")
    bare = isinstance(error, SystemExit | KeyError | ArithmeticError) or not text
    return f"{type(error).__name__}: {text}".rstrip(": ") if bare else text
