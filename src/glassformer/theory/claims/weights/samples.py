"""Bounds on sample statistics that hold for every sample size, with their probability of a false alarm."""

import math

import numpy as np
from numpy.typing import NDArray

DELTA = 1e-6
"""The most that chance alone may fail a statistical check."""

Samples = NDArray[np.floating]


def median_of_means(samples: Samples, groups: int) -> float:
    """The median of the means of equal groups.

    With k groups of n samples in all it misses the mean by more than 2 sqrt(variance k / n) with probability at most
    e^(-k/8): one group does so with probability 1/4 or less (Chebyshev), and half of them would have to (Hoeffding).
    """
    return float(np.median(samples.reshape(groups, -1).mean(axis=1)))


def dkw_threshold(n: int, delta: float = DELTA) -> float:
    """sqrt(ln(2/delta) / 2n): how far an empirical CDF may be from the true one (Dvoretzky et al.; Massart 1990)."""
    return math.sqrt(math.log(2 / delta) / (2 * n))


def largest_gap(cdf_at_samples: Samples) -> float:
    """sup |F_n - F|, from the true CDF at each sample."""
    ordered = np.sort(np.asarray(cdf_at_samples, dtype=np.float64))
    n = len(ordered)
    steps = np.arange(1, n + 1) / n
    return float(max((steps - ordered).max(), (ordered - steps + 1 / n).max()))


def half_width(samples: Samples, span: float = 1.0, delta: float = DELTA) -> float:
    """Empirical Bernstein: the mean of values within a span lies this near to its expectation, but for `delta`.

    sqrt(2 V ln(4/delta) / n) + 7 span ln(4/delta) / 3(n-1), V the sample variance (Maurer and Pontil 2009, theorem 4,
    on both sides).
    """
    n, log = len(samples), math.log(4 / delta)
    return math.sqrt(2 * float(samples.var(ddof=1)) * log / n) + 7 * span * log / (3 * (n - 1))
