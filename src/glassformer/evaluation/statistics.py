"""Standard errors of means over values that are not independent, and intervals from them.

The tokens of a text are correlated: a surprising passage has many surprising tokens. A standard error that takes them
as independent is too small. Here values are summed over clusters (documents, or blocks of neighbouring tokens), and
the spread of the clusters gives the error.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

FEWEST = 8
"""Fewest clusters from which a standard error is estimated."""
ENOUGH = 32
"""Blocks that give a standard error to about an eighth: blocks are lengthened as long as this many are left."""
LEVEL = 0.95
"""Probability with which an interval covers the true value."""

Unit = Literal["documents", "blocks", "groups", "rows"]
"""What a cluster is."""


@dataclass(frozen=True)
class Spread:
    """The standard error of a ratio, and the clusters that it was estimated from."""

    standard_error: float | None
    """None if there are fewer than 8 clusters."""
    unit: Unit
    count: int
    """Number of clusters."""
    block: int | None = None
    """Tokens per block; None if a cluster is not a block."""

    def interval(self, value: float) -> tuple[float, float] | None:
        """Return the ends of the 95 % interval around a value; None without a standard error."""
        if self.standard_error is None:
            return None
        half = student(LEVEL, self.count - 1) * self.standard_error
        return value - half, value + half

    def text(self) -> str:
        """Return what the error was estimated from, as a phrase."""
        if self.standard_error is None:
            return f"no standard error: {self.count} {self.unit} are too few, {FEWEST} are needed"
        of = f" of {self.block:,} tokens" if self.block is not None else ""
        return f"standard error from {self.count:,} {self.unit}{of}"


def student(level: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t for at least 7 degrees of freedom, to 0.001.

    It is the expansion of Cornish and Fisher in powers of 1 / freedom.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def ratio_error(sums: np.ndarray, weights: np.ndarray) -> float:
    """Return the standard error of sum(sums) / sum(weights) over independent clusters (linearised)."""
    n, total = len(sums), float(weights.sum())
    residuals = sums - float(sums.sum()) / total * weights
    return math.sqrt(n / (n - 1) * float(np.square(residuals).sum())) / total


def spread(values: np.ndarray, weights: np.ndarray, lengths: list[int]) -> Spread:
    """Return the standard error of sum(values) / sum(weights), whose values belong to documents of these lengths.

    With at least 8 documents, a document is a cluster. Otherwise the clusters are blocks of b neighbours that do not
    cross the end of a document, where b is the largest power of two that leaves 32 blocks. If these are too short, b
    is the smallest power of two with b^3 > 2 n s^2, as long as 8 blocks are left: n is the number of values, and s the
    factor by which blocks enlarge the variance. This balances the bias of short blocks with the noise of few (Lee, Kim
    and Needs 2011).
    """
    starts = np.cumsum([0, *lengths])[:-1]
    starts = starts[np.asarray(lengths) > 0]
    if len(starts) >= FEWEST:
        return Spread(_error(values, weights, starts), "documents", len(starts))
    n, naive, found = len(values), 0.0, Spread(None, "blocks", len(values), 1)
    for power in range(n.bit_length()):
        b = 1 << power
        begins = np.concatenate([np.arange(start, start + length, b) for start, length in _extents(starts, n)])
        if len(begins) < FEWEST:
            break
        error = _error(values, weights, begins)
        naive = naive or error
        found = Spread(error, "blocks", len(begins), b)
        inflation = (error / naive) ** 2 if naive else 1.0
        if len(begins) < 2 * ENOUGH and b**3 > 2 * n * inflation**2:
            break
    return found


def grouped(values: np.ndarray, groups: list[str] | None) -> Spread:
    """Return the standard error of the mean of values, of which those of one group are correlated."""
    if groups is None:
        n = len(values)
        error = ratio_error(values, np.ones(n)) if n >= FEWEST else None
        return Spread(error, "rows", n)
    names, index = np.unique(groups, return_inverse=True)
    sums = np.bincount(index, weights=values)
    counts = np.bincount(index).astype(float)
    return Spread(ratio_error(sums, counts) if len(names) >= FEWEST else None, "groups", len(names))


def _extents(starts: np.ndarray, n: int) -> list[tuple[int, int]]:
    ends = [*starts[1:].tolist(), n]
    return [(start, end - start) for start, end in zip(starts.tolist(), ends, strict=True)]


def _error(values: np.ndarray, weights: np.ndarray, begins: np.ndarray) -> float:
    return ratio_error(np.add.reduceat(values, begins), np.add.reduceat(weights, begins))
