"""Two models on the same text: their difference with a paired standard error.

Both models find the same passages hard, so the difference varies far less than either loss, and its own standard error
is smaller than what two separate ones give.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from glassformer.evaluation.cross_entropy import Evaluation, Scored
from glassformer.evaluation.score import EvaluationError
from glassformer.evaluation.statistics import Spread, spread

Measure = Literal["bits per byte", "nats per token"]


@dataclass(frozen=True, repr=False)
class Difference:
    """The cross-entropy of a first model minus that of a second one on the same text.

    It is negative if the first model is better.
    """

    value: float
    measure: Measure
    """Bits per byte, or nats per token if the text is not known."""
    spread: Spread
    unpaired_error: float | None
    """What the two separate standard errors would give, for comparison."""

    @property
    def standard_error(self) -> float | None:
        return self.spread.standard_error

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the difference."""
        return self.spread.interval(self.value)

    @property
    def better(self) -> Literal["first", "second"] | None:
        """The better model; None if the interval contains 0, or if there is no interval."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return None
        return "first" if self.value < 0 else "second"

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "measure": self.measure,
            "standard_error": self.standard_error,
            "interval": self.interval,
            "unpaired_error": self.unpaired_error,
            "better": self.better,
            "error_unit": self.spread.unit,
            "error_units": self.spread.count,
            "block": self.spread.block,
        }

    def __repr__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"<Difference: {self.value:+.4f}{error} {self.measure}, better: {self.better or 'not decided'}>"


def paired_difference(first: Evaluation, second: Evaluation) -> Difference:
    """Return the difference of two evaluations of the same text.

    The text is divided where tokens of both models end, so that models with different tokenizers can be compared. What
    only one of them scores (the first token of a document) is left out.
    """
    pairs = [(a, b) for a, b in _matched(first, second) if len(a.nats) and len(b.nats)]
    known = all(one.document.ends is not None for pair in pairs for one in pair)
    parts = [_segments(a, b, known) for a, b in pairs]
    nats_a, nats_b, weights = (np.concatenate([np.zeros(0), *(part[i] for part in parts)]) for i in range(3))
    if not weights.sum():
        raise EvaluationError("the two models score no common part of the text: give a longer text.")
    unit = math.log(2) if known else 1.0
    deltas = (nats_a - nats_b) / unit
    errors = [one.bits_spread if known else one.spread for one in (first, second)]
    apart = [None if error is None else error.standard_error for error in errors]
    return Difference(
        value=float(deltas.sum() / weights.sum()),
        measure="bits per byte" if known else "nats per token",
        spread=spread(deltas, weights, [len(part[0]) for part in parts]),
        unpaired_error=None if None in apart else math.hypot(*apart),  # type: ignore[arg-type]
    )


def _matched(first: Evaluation, second: Evaluation) -> list[tuple[Scored, Scored]]:
    """Return the documents of both; refuse different texts."""
    problem = EvaluationError("the two evaluations are of different texts: evaluate both models on the same one.")
    if len(first.scored) != len(second.scored):
        raise problem
    pairs = list(zip(first.scored, second.scored, strict=True))
    for a, b in pairs:
        same_tokens = np.array_equal(a.document.tokens, b.document.tokens)
        if a.document.text is None or b.document.text is None:
            if not same_tokens:
                raise problem
        elif a.document.text != b.document.text:
            raise problem
    return pairs


def _segments(a: Scored, b: Scored, known: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the nats of both in each common segment, and the bytes (or tokens) of the segment."""
    reached = [_reached(one, known) for one in (a, b)]
    common = np.intersect1d(reached[0][0], reached[1][0])
    sums = []
    for ends, total in reached:
        last = np.searchsorted(ends, common, side="right") - 1  # tokens without bytes belong to the one before them
        sums.append(np.diff(total[last]))
    return sums[0], sums[1], np.diff(common).astype(float)


def _reached(one: Scored, known: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the scored tokens with the start before them, and the nats up to each."""
    n = len(one.document.tokens)
    ends = one.document.ends if known and one.document.ends is not None else np.arange(1, n + 1)
    begin = ends[0] if one.left_out else 0
    return np.append(begin, ends[one.left_out :]), np.append(0.0, np.cumsum(one.nats))
