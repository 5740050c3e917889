"""The type of an exercise: a problem, a stub, a reference solution, recorded wrong solutions, and test cases.

A wrong solution is an edit of the source of the reference solution, so it is code as a student writes it. The grader
compares a wrong answer with the answers of these wrong solutions, so it can report what is wrong and not only that
something is.
"""

import ast
import importlib
import inspect as inspection
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from glassformer.errors import GlassformerError

Array = np.ndarray
Arguments = dict[str, Any]
SECONDS = 10
"""Limit of processor time for one submission; the limit of wall-clock time is twice this."""


class ExerciseError(GlassformerError):
    """An unknown exercise, or a file that cannot be used. The message is one sentence."""


@dataclass(frozen=True)
class Case:
    """One call of the student's function."""

    label: str
    """A description of the case that follows the word "for" in a message."""
    arguments: Mapping[str, Any]
    """Arguments in the order of the function's parameters."""
    hint: str = ""
    """The hint for an answer that is wrong only in this case."""
    hidden: Any = None
    """What `accepts` needs to know and the student's function must not."""


@dataclass(frozen=True)
class Mistake:
    """A common mistake: a recorded wrong solution with the explanation of a tutor."""

    message: str
    """Tells the student what the code does and what to do instead."""
    edits: Mapping[str, str]
    """Text of the reference solution and the text that replaces it, everywhere. The result makes the mistake."""


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    problem: str
    solve: Callable[..., Any]
    """The reference solution. Its name, parameters and docstring are those of the student's function."""
    cases: Callable[[np.random.Generator], list[Case]]
    returns: tuple[str, ...]
    """Names of the returned values; more than one means a tuple."""
    mistakes: tuple[Mistake, ...]
    inspect: Callable[[Mapping[str, Any], tuple[Any, ...]], str] = field(default=lambda arguments, values: "")
    """Returns what can be concluded from a wrong answer alone, or an empty string."""
    accepts: Callable[[Case, tuple[Any, ...]], str] | None = None
    """For a problem with more than one correct answer: returns what is wrong with an answer, or an empty string.
    Default: the answer must be that of the reference solution."""
    claims: tuple[str, ...] = ()
    """Ids of related claims for `glass check`."""
    sources: tuple[str, ...] = ()
    """Coding tasks of the sources that this exercise covers, as cited in the table of coverage."""
    whole: bool = False
    """True if answers are integers that must match exactly."""
    given: tuple[str, ...] = ()
    """Names of helper functions that the file to start from already contains."""
    seconds: int = SECONDS
    """Limit of processor time for one submission."""
    broken: tuple[Mistake, ...] = ()
    """Mistakes that the file to start from contains, if it is a program to repair."""
    hints: tuple[str, ...] = ()
    """Three hints: the idea, the method, almost the code."""

    @property
    def function(self) -> str:
        """The name of the function to write."""
        return self.solve.__name__

    @property
    def stub(self) -> str:
        """The file to start from: the given helpers and the signature of the function, or a program to repair."""
        if self.broken:
            return self._edited(self.solution, self.broken)
        names = ", ".join(inspection.signature(self.solve).parameters)
        function = f'def {self.function}({names}):\n    """{inspection.getdoc(self.solve)}"""\n    ...\n'
        before = excerpt(self.solve, self.given, imports_of=(self.function,))
        return f"{before}\n\n{function}" if before else function

    @property
    def solution(self) -> str:
        """The source of the reference solution, as a file that the grader accepts."""
        return excerpt(self.solve, (self.function,))

    def variant(self, mistakes: Iterable[Mistake] = ()) -> Callable[..., Any] | None:
        """Return the function with these mistakes, or None if they exclude each other. Given helpers never change."""
        text = self._edited(excerpt(self.solve, (self.function,), without=self.given), mistakes)
        return _compiled(self.solution, text, self.function) if text else None

    @staticmethod
    def _edited(text: str, mistakes: Iterable[Mistake]) -> str:
        """Return the text with these mistakes, or an empty string if they exclude each other."""
        for mistake in mistakes:
            for old, new in mistake.edits.items():
                if old not in text:
                    return ""
                text = text.replace(old, new)
        return text


@cache
def _words(module: str) -> dict[str, dict[str, Any]]:
    text = (files(__package__) / "words" / f"{module}.toml").read_text(encoding="utf-8")
    return {words["id"]: words for words in tomllib.loads(text)["exercise"]}


def exercise(
    id: str,
    solve: Callable[..., Any],
    draw: Callable[..., Mapping[str, Any]] = lambda rng, **arguments: arguments,
    mistakes: tuple[Mistake, ...] = (),
    **others: Any,
) -> Exercise:
    """Return an exercise whose words are in `words/MODULE.toml`, where MODULE is the module of `solve`.

    The words list the cases, each with a label, an optional hint, and what `draw` needs to draw the arguments.
    Default: these are the arguments themselves. `mistakes` are those that exercises share or that a judge uses;
    `others` are `inspect`, `accepts` and, if they are not in the words, `cases`.
    """
    words = dict(_words(solve.__module__.rpartition(".")[2])[id])
    rows = words.pop("cases", [])

    def cases(rng: np.random.Generator) -> list[Case]:
        drawn = [draw(rng, **{name: row[name] for name in row if name not in ("label", "hint")}) for row in rows]
        return [Case(row["label"], made, row.get("hint", "")) for row, made in zip(rows, drawn, strict=True)]

    listed = words.pop("mistakes", [])
    own = [Mistake(one["message"], dict(one["edits"])) for one in listed]
    broken = tuple(mistake for mistake, one in zip(own, listed, strict=True) if one.get("planted"))
    texts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}
    facts = {"cases": cases, "mistakes": (*mistakes, *own), "broken": broken, **others, **texts}
    return Exercise(solve=solve, **facts)


@lru_cache(maxsize=1024)
def _compiled(solution: str, text: str, function: str) -> Callable[..., Any] | None:
    names: dict[str, Any] = {"np": np}
    exec(compile(solution, f"<{function}>", "exec"), names)
    try:
        exec(compile(text, f"<{function}>", "exec"), names)
    except SyntaxError:  # two edits of the same line
        return None
    found: Callable[..., Any] = names[function]
    return found


def excerpt(
    function: Callable[..., Any], names: Iterable[str], imports_of: Iterable[str] = (), without: Iterable[str] = ()
) -> str:
    """Return the source of these functions of `function`'s module, and of everything in the module that they use.

    Functions that the module imports from this folder are included as text. Annotations of parameters are left out.
    `imports_of` names functions of which only the imports are included, `without` those to leave out.
    """
    return _excerpt(function.__module__, tuple(names), tuple(imports_of), tuple(without))


@lru_cache(maxsize=512)
def _excerpt(module: str, names: tuple[str, ...], imports_of: tuple[str, ...], without: tuple[str, ...]) -> str:
    defined = _definitions(module)
    used, extra = _uses(names, defined), _uses(imports_of, defined)
    used |= {name for name in extra if isinstance(defined[name], ast.Import)}
    used -= set(without)
    imports = [ast.unparse(defined[name]) for name in defined if name in used and isinstance(defined[name], ast.Import)]
    rest = [_text(defined[name]) for name in defined if name in used and not isinstance(defined[name], ast.Import)]
    return "\n\n".join(part + "\n" for part in ("\n".join(dict.fromkeys(imports)), *rest) if part)


@lru_cache(maxsize=64)
def _definitions(module: str) -> dict[str, ast.stmt]:
    """Return the imports, functions and constants of a module by name. Each node carries its lines of source."""
    source = inspection.getsource(importlib.import_module(module))
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        found: dict[str, ast.stmt] = {}
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(__package__):
            others = _definitions(str(node.module))
            found = {alias.name: others[alias.name] for alias in node.names if alias.name in others}
        elif isinstance(node, ast.Import):
            found = {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            found = {node.name: node}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = {node.targets[0].id: node}
        for name, kept in found.items():
            if kept is node:
                kept.lines = source.splitlines()[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
            defined[name] = kept
    return defined


def _uses(names: Iterable[str], defined: Mapping[str, ast.stmt]) -> set[str]:
    """Return the top-level names that these functions need, directly or through others. Annotations are ignored."""
    used: set[str] = set()
    new = set(names) & defined.keys()
    while new:
        used |= new
        parts = [part for name in new for part in _parts(defined[name])]
        found = {inner.id for part in parts for inner in ast.walk(part) if isinstance(inner, ast.Name)}
        new = (found & defined.keys()) - used
    return used


def _parts(node: ast.stmt) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.FunctionDef) else [node]


def _text(node: ast.stmt) -> str:
    lines: list[str] = node.lines  # type: ignore[attr-defined]
    if not isinstance(node, ast.FunctionDef):
        return "\n".join(lines)
    arguments = ast.arguments([], [ast.arg(argument.arg) for argument in node.args.args], None, [], [], None,
                              node.args.defaults)  # fmt: skip
    return "\n".join([f"def {node.name}({ast.unparse(arguments)}):", *lines[node.body[0].lineno - node.lineno :]])


def softmax(scores: Array, axis: int = -1) -> Array:
    """Return e^s / sum e^s along an axis, without overflow."""
    raised = np.exp(scores - scores.max(axis, keepdims=True))
    return np.asarray(raised / raised.sum(axis, keepdims=True))
