"""`glass compare`: two implementations of one model to the first operation where they part."""

import importlib
import importlib.util
import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from glassformer.cli.common import InputError, Json


def compare(
    a: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="A", help="A folder, file.py:name or package.module:name.")
    ],
    b: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="B", help="The same; a name is a model or builds one.")
    ],
    tokens: Annotated[
        tuple[int, ...], tyro.conf.arg(help="Token ids to compare on, instead of the cases drawn here.")
    ] = (),
    vocab_size: Annotated[
        int | None, tyro.conf.arg(help="Only these first ids, where one vocabulary is padded.")
    ] = None,
    kind: Annotated[
        Literal["decoder", "encoder", "seq2seq"] | None, tyro.conf.arg(help="Where a model is taken for another kind.")
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        tyro.conf.arg(help="The precision called own; each model's by default."),
    ] = None,
    html: Annotated[Path | None, tyro.conf.arg(help="Also write one self-contained HTML page.")] = None,
    json: Json = False,
) -> int:
    """Compare two implementations of one model. Exit 0 same (within rounding), 1 they differ, 2 could not compare."""
    if vocab_size is not None and vocab_size < 2:
        raise InputError(f"--vocab-size {vocab_size} must be at least 2.")
    if html is not None:
        if html.suffix.lower() not in (".html", ".htm"):
            raise InputError(f"--html {html} must be an .html file.")
        if not html.parent.is_dir():
            raise InputError(f"--html {html}: there is no folder {html.parent}.")
    from glassformer.compare.page import write
    from glassformer.compare.run import compare as side_by_side

    result = side_by_side(
        find(a), find(b), tokens=list(tokens) or None, vocab_size=vocab_size, kind=kind, dtype=dtype, names=(a, b)
    )
    if html is not None:
        write(result, html)
    if json:
        print(json_module.dumps({**result.to_dict(), **({"html": str(html)} if html else {})}))
    else:
        print(result.text())
        if html is not None:
            print(f"{html}: the same as a page")
    return 0 if result.same else 1


def find(subject: str) -> Any:
    """The model that a command line names: a folder's, or what a name in a file or module is or builds."""
    if Path(subject).is_dir():
        from glassformer.weights import load

        return load(subject)
    place, colon, name = subject.rpartition(":")
    if not colon or not place or not name:
        raise InputError(
            f"{subject} is no folder and names nothing: give a folder, file.py:name or package.module:name."
        )
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            from glassformer.config.errors import nearest

            public = [n for n in vars(module) if not n.startswith("_")]
            raise InputError(f"{place} has no {name}.{nearest(name, public).replace('Fields', 'It has')}")
        found = getattr(found, part)
    return _built(found, subject)


def _built(found: Any, subject: str) -> Any:
    """A model as it is; a class or function without required arguments is called for one."""
    import inspect

    from torch import nn

    if isinstance(found, nn.Module) or not callable(found):
        return found
    if not isinstance(found, type):
        required = [p for p in inspect.signature(found).parameters.values() if _required(p)]
        if required:  # a function of tokens
            return found
    try:
        return found()
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{subject} failed when it was called to build a model: {said}.") from None


def _required(parameter: Any) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (0, 1, 3)


def _file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a Python file, a folder or package.module:name.")
    spec = importlib.util.spec_from_file_location(f"_glass_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and deep copies look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        return _executed(lambda: spec.loader.exec_module(module), module, str(path))
    finally:
        sys.path.remove(str(path.parent.resolve()))


def _module(name: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{name} is neither a Python file nor a module: give file.py:name or package.module:name.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _executed(lambda: importlib.import_module(name), None, name)
    finally:
        sys.path.remove(str(Path.cwd()))


def _executed(run: Any, module: Any, name: str) -> Any:
    try:
        return run() or module
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name} cannot be imported: {said}.") from None
