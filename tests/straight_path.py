"""Trace a call: our functions and files that it enters, and the stack frames from token ids to the attention kernel."""

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

SOURCE = Path(__file__).parents[1] / "src" / "glassformer"


class ReachedAttention(BaseException):
    """Raised at the first call of the fused attention kernel."""


class AttentionWatcher(TorchFunctionMode):
    """Record our own stack frames at the first call of torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[CodeType] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "scaled_dot_product_attention" and not self.frames:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if is_ours(frame.f_code):
                    self.frames.insert(0, frame.f_code)
                frame = frame.f_back
            raise ReachedAttention
        return func(*args, **(kwargs or {}))


def is_ours(code: CodeType) -> bool:
    """Return whether this is a function of the package. The body of a module or of a class is not one."""
    return code.co_filename.startswith(str(SOURCE)) and bool(code.co_flags & inspect.CO_OPTIMIZED)


def trace(call: Callable[[], Any]) -> list[CodeType]:
    """Return all our functions that a call enters, in the order of their first calls."""
    entered: dict[CodeType, None] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_ours(frame.f_code):
            entered[frame.f_code] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(entered)


def trace_to_attention(call: Callable[[], Any]) -> tuple[list[CodeType], list[CodeType]]:
    """Return our frames on the stack at the attention kernel, and all our functions entered before it."""
    watcher = AttentionWatcher()

    def until_attention() -> None:
        with watcher, contextlib.suppress(ReachedAttention):
            call()

    entered = trace(until_attention)
    assert watcher.frames, "the call never reached attention"
    return watcher.frames, entered


@functools.cache
def body_lines(code: CodeType) -> int:
    """Lines of a function's body that hold code: no signature, docstring, comment or blank line."""
    text = Path(code.co_filename).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node, ast.FunctionDef | ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
        ):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if first == code.co_firstlineno and (not isinstance(node, ast.FunctionDef) or node.name == code.co_name):
                break
    else:
        raise LookupError(f"{code.co_qualname} is not in {code.co_filename}")
    if not isinstance(node, ast.FunctionDef):
        return 0  # a comprehension belongs to the lines of the function around it
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    lines = text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def describe(codes: list[CodeType]) -> str:
    """The path, one function a line."""
    rows = [
        f"{body_lines(code):4} {Path(code.co_filename).relative_to(SOURCE).as_posix()}:{code.co_firstlineno} "
        f"{code.co_qualname}"
        for code in codes
    ]
    return "\n".join([*rows, f"{sum(map(body_lines, codes)):4} lines in {len(codes)} functions"])


def own_files(codes: list[CodeType]) -> dict[str, int]:
    """Return the files of the functions in the order in which they are entered, each with its number of functions."""
    files: dict[str, int] = {}
    for code in codes:
        name = Path(code.co_filename).relative_to(SOURCE).as_posix()
        files[name] = files.get(name, 0) + 1
    return files


def describe_files(files: dict[str, int]) -> str:
    """The files of a path, one a line, each with the number of its functions that were entered."""
    rows = [f"{number:4} {name}" for name, number in files.items()]
    return "\n".join([*rows, f"{sum(files.values()):4} functions in {len(files)} files"])
