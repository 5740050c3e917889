"""From what a user types to a model: a folder, `file.py:name` or `package.module:name`. Code runs only when named."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from glassformer.checks.errors import CannotExamineError
from glassformer.checks.isolate import quiet, time_limit
from glassformer.config.errors import nearest
from glassformer.weights import load as load_folder


def resolve(text: str, seconds: float | None = None) -> tuple[Any, str]:
    """The model that a text names, and what to call it. Raises CannotExamineError or WeightsError, one sentence."""
    path, _, name = text.rpartition(":")
    if not path or Path(text).is_dir():
        model: Any = load_folder(text)
        return model, f"{Path(text).name or text} (loaded into glassformer's own engine)"
    with time_limit(seconds, f"importing {path}"), quiet():
        module = _from_file(Path(path)) if path.endswith(".py") else _from_name(path)
        thing = _attribute(module, name, text)
        return _built(thing, text), text


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CannotExamineError(f"there is no file {str(path)!r}: give file.py:name with a path that exists.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CannotExamineError(f"{str(path)!r} is no Python file: give file.py:name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except CannotExamineError:
        raise
    except (Exception, SystemExit) as error:
        raise CannotExamineError(f"{str(path)!r} stops while it is imported: {_words(error)}.") from None
    finally:
        sys.path.pop(0)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CannotExamineError(f"there is no module {name!r} ({_words(error)}): give package.module:name.") from None
    except (Exception, SystemExit) as error:
        raise CannotExamineError(f"module {name!r} stops while it is imported: {_words(error)}.") from None
    finally:
        sys.path.pop(0)


def _attribute(module: ModuleType, name: str, text: str) -> Any:
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            known = [n for n in vars(thing) if not n.startswith("_")] if hasattr(thing, "__dict__") else []
            hint = nearest(part, known).replace("Fields:", "Names:") if known else ""
            raise CannotExamineError(f"{text!r}: there is no name {part!r} there.{hint}")
        thing = getattr(thing, part)
    return thing


def _built(thing: Any, text: str) -> Any:
    """An instance as it is; a class or a function without required arguments is called; else it is the model itself."""
    if isinstance(thing, nn.Module):
        return thing
    if not callable(thing):
        raise CannotExamineError(f"{text!r} is a {type(thing).__name__}: name a model, or a function that builds one.")
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
            f"{text!r} needs {', '.join(required)} to be built: name an instance, or a function that builds one."
        )
    if required:
        return thing
    try:
        built = thing()
    except CannotExamineError:
        raise
    except (Exception, SystemExit) as error:
        raise CannotExamineError(f"{text!r} stops while it builds the model: {_words(error)}.") from None
    if built is None or not callable(built):
        raise CannotExamineError(
            f"{text!r} returns {type(built).__name__}: it must return a model, tokens in and logits out."
        )
    return built


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}".rstrip(".: ") if text else type(error).__name__
