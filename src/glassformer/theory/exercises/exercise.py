"""What an exercise is: a problem, a stub, a solution that can be told to make each usual mistake, and cases.

`solve(**arguments)` is right; `solve(**arguments, **mistake.twist)` is wrong in one known way. A grader that knows the
usual wrong answers can say what is wrong, not only that something is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glassformer.errors import GlassformerError


class ExerciseError(GlassformerError):
    """An exercise that is not known, or a file that cannot be used. One sentence."""


@dataclass(frozen=True)
class Case:
    """One call of the student's function."""

    label: str
    """What is special about it, to go after `for`."""
    arguments: Mapping[str, Any]
    """In the order of the function's parameters."""
    hint: str = ""
    """What it means to be wrong here and right elsewhere."""


@dataclass(frozen=True)
class Mistake:
    """One usual way to be wrong."""

    says: str
    """To the student: what was done, and what to do instead."""
    twist: Mapping[str, Any]
    """Arguments with which `solve` makes it."""


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    problem: str
    stub: str
    """A file to start from, with the function to be written."""
    function: str
    solve: Callable[..., Any]
    cases: Callable[[np.random.Generator], list[Case]]
    returns: tuple[str, ...]
    """Names of what is returned; several: a tuple."""
    mistakes: tuple[Mistake, ...]
    inspect: Callable[[Mapping[str, Any], tuple[Any, ...]], str] = field(default=lambda arguments, values: "")
    """What can be seen from a wrong answer alone; empty: nothing."""
    claims: tuple[str, ...] = ()
    """Where to read on: ids for `glass check`."""
    whole: bool = False
    """Answers are whole numbers, to be met exactly."""


def softmax(scores: np.ndarray, axis: int = -1, shift: bool = True) -> np.ndarray:
    """e^s / sum e^s along an axis, the largest score taken away first."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        raised = np.exp(scores - scores.max(axis, keepdims=True) if shift else scores)
        return np.asarray(raised / raised.sum(axis, keepdims=True))
