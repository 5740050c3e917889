"""The type of an exercise: a problem, a stub, a solution that can also make each common mistake, and test cases.

`solve(**arguments)` is correct; `solve(**arguments, **mistake.changes)` is wrong in one known way. The grader compares
a wrong answer with these known mistakes, so it can report what is wrong and not only that something is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import getdoc, signature
from typing import Any

import numpy as np

from glassformer.errors import GlassformerError


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


@dataclass(frozen=True)
class Mistake:
    """A common mistake."""

    message: str
    """Tells the student what the code does and what to do instead."""
    changes: Mapping[str, Any]
    """Extra arguments with which `solve` makes the mistake."""


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    problem: str
    solve: Callable[..., Any]
    """The correct function. Its name, positional parameters and docstring are those of the student's function."""
    cases: Callable[[np.random.Generator], list[Case]]
    returns: tuple[str, ...]
    """Names of the returned values; more than one means a tuple."""
    mistakes: tuple[Mistake, ...]
    inspect: Callable[[Mapping[str, Any], tuple[Any, ...]], str] = field(default=lambda arguments, values: "")
    """Returns what can be concluded from a wrong answer alone, or an empty string."""
    claims: tuple[str, ...] = ()
    """Ids of related claims for `glass check`."""
    whole: bool = False
    """True if answers are integers that must match exactly."""
    given: str = "import numpy as np\n"
    """What precedes the function in the file to start from."""

    @property
    def function(self) -> str:
        """The name of the function to write."""
        return self.solve.__name__

    @property
    def stub(self) -> str:
        """The file to start from, with the signature of the function."""
        parameters = signature(self.solve).parameters.values()
        names = ", ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        function = f'def {self.function}({names}):\n    """{getdoc(self.solve)}"""\n    ...\n'
        return f"{self.given}\n\n{function}" if self.given else function


def softmax(scores: np.ndarray, axis: int = -1, shift: bool = True) -> np.ndarray:
    """Return e^s / sum e^s along an axis; `shift` subtracts the largest score first."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        raised = np.exp(scores - scores.max(axis, keepdims=True) if shift else scores)
        return np.asarray(raised / raised.sum(axis, keepdims=True))
