"""Number of dimensions k in which a random projection keeps all distances of m points within a factor of 1 ± eps.

Each of these is sufficient; none is the minimum:

* 8·ln(m)/eps²: the most common form, for small eps;
* 4·ln(m)/(eps²/2 - eps³/3): Dasgupta and Gupta 2003, theorem 2.1, for squared distances;
* the exact union bound. For a Gaussian projection A, |Ax|²/|x|² is distributed as chi²_k/k, so the probability that any
  of the C(m,2) pairs violates the bounds is at most C(m,2)·P(chi²_k/k outside [low, high]). The result is the smallest
  k for which this is at most delta. For squared distances the bounds are 1 ± eps, for distances (1 ± eps)².
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from glassformer.sizing.layout import columns, with_note, wrap


@dataclass(frozen=True)
class JohnsonLindenstrauss:
    """Sufficient dimensions for `points` points at distortion `eps`, by the rules of the module docstring."""

    points: int
    eps: float
    delta: float
    formula: int
    """ceil(8·ln(m)/eps²)."""
    strict: int
    """ceil(4·ln(m)/(eps²/2 - eps³/3))."""
    exact_squared: int
    """Smallest k for which the union bound on squared distances is at most delta."""
    exact_distance: int
    """Smallest k for which the union bound on distances is at most delta."""
    log10_failure_squared: float
    """log10 of the union bound at k = formula, squared distances. Above 0 the bound is vacuous."""
    log10_failure_distance: float
    """log10 of the union bound at k = formula, distances."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self, width: int | None = None) -> str:
        """Return the four results as text. What does not fit into `width` goes on the next line."""
        m, eps = f"{self.points:,}", f"{self.eps:g}"
        failure_probability = f"fails with probability ≤ {self.delta:g}"
        rules = [
            (f"8·ln(m)/eps² = 8·ln({self.points:.4g})/{eps}²", self.formula, "small-eps form"),
            (f"4·ln(m)/(eps²/2 − eps³/3), eps = {eps}", self.strict, "squared distances, Dasgupta and Gupta"),
            ("exact chi² union bound, squared distances", self.exact_squared, failure_probability),
            ("exact chi² union bound, distances", self.exact_distance, failure_probability),
        ]
        title = f"Johnson–Lindenstrauss: {m} points, distances kept within 1 ± {eps}"
        numbers = columns([(rule, f"{k:,}") for rule, k, _ in rules], width)
        failure = (
            f"  At k = {self.formula:,} the union bound on failure is {_power(self.log10_failure_squared)} for squared "
            f"distances and {_power(self.log10_failure_distance)} for distances."
        )
        meaning = (
            "  Each k is sufficient for a random projection; none is the minimum. Learned embeddings are not random "
            "projections."
        )
        lines = [with_note(line, note, width) for line, (_, _, note) in zip(numbers, rules, strict=True)]
        notes = [wrap(note, width, "  ") for note in (failure, meaning)]
        return "\n".join([wrap(title, width), "", *lines, "", *notes])


def johnson_lindenstrauss(points: float, eps: float, delta: float = 0.01) -> JohnsonLindenstrauss:
    """Return sufficient dimensions for `points` points: for 1e12 points at eps = 0.1, 22,105; 23,684; 23,821 and 5,764.

    Each exact bound sums about 35/eps terms: 0.05 s at eps = 0.001, and ten times as long for each further digit.
    """
    if not (math.isfinite(points) and points >= 2 and points == int(points)):
        raise ValueError(f"points={points} must be a whole number of at least 2: a distance needs two points.")
    if not 0 < eps < 1:
        raise ValueError(f"eps={eps} must be strictly between 0 and 1, for example 0.1 for 10 %.")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} is a probability of failure and must be strictly between 0 and 1.")
    log_m = math.log(points)
    formula = math.ceil(8 * log_m / eps**2)
    squared, distance = (1 - eps, 1 + eps), ((1 - eps) ** 2, (1 + eps) ** 2)
    return JohnsonLindenstrauss(
        points=int(points),
        eps=eps,
        delta=delta,
        formula=formula,
        strict=math.ceil(4 * log_m / (eps**2 / 2 - eps**3 / 3)),
        exact_squared=_least_dimension(points, *squared, delta),
        exact_distance=_least_dimension(points, *distance, delta),
        log10_failure_squared=log_union_bound(points, formula, *squared) / math.log(10),
        log10_failure_distance=log_union_bound(points, formula, *distance) / math.log(10),
    )


def log_union_bound(points: float, k: int, low: float, high: float) -> float:
    """Return ln of the union bound C(m,2)·P(chi²_k/k < low or > high)."""
    log_pairs = math.log(points) + math.log(points - 1) - math.log(2)
    return log_pairs + _log_add(log_gamma_lower(k / 2, low), log_gamma_upper(k / 2, high))


def _least_dimension(points: float, low: float, high: float, delta: float) -> int:
    """Return the smallest k with union bound <= delta.

    ln of the bound is nearly linear in k, so the secant method converges fast. It falls back to bisection for a step
    when the secant makes little progress.
    """
    target = math.log(delta)
    fails, passes = 0, 1
    excess_fails = math.log(points) + math.log(points - 1) - math.log(2) - target  # the bound at k = 0 is C(m,2)
    excess_passes = log_union_bound(points, passes, low, high) - target
    while excess_passes > 0:
        fails, excess_fails = passes, excess_passes
        passes *= 2
        excess_passes = log_union_bound(points, passes, low, high) - target
    bisect = False
    while passes - fails > 1:
        share = 0.5 if bisect else excess_fails / (excess_fails - excess_passes)
        k = min(max(fails + round(share * (passes - fails)), fails + 1), passes - 1)
        excess = log_union_bound(points, k, low, high) - target
        bisect = not bisect and min(k - fails, passes - k) < (passes - fails) // 8  # little progress
        if excess > 0:
            fails, excess_fails = k, excess
        else:
            passes, excess_passes = k, excess
    return passes


# The logarithms of the regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x), with x = a·ratio. The
# tail probabilities needed here are near 1e-26, which 1 - P cannot represent. Both expansions are in Numerical
# Recipes, section 6.2.


def log_gamma_lower(a: float, ratio: float) -> float:
    """Return ln P(a, a·ratio) for ratio < 1.

    Series: x^a e^-x / Gamma(a+1) · (1 + x/(a+1) + x²/((a+1)(a+2)) + ...).
    """
    x, term, total, n = a * ratio, 1.0, 1.0, 1
    while term > total * 1e-17:
        term *= x / (a + n)
        total += term
        n += 1
    return _log_weight(a, ratio) + math.log(total)


def log_gamma_upper(a: float, ratio: float) -> float:
    """Return ln Q(a, a·ratio) for ratio > 1.

    Continued fraction: x^a e^-x / Gamma(a) · 1/(x+1-a - 1(1-a)/(x+3-a - 2(2-a)/(x+5-a - ...))), evaluated with Lentz's
    method: each step multiplies the current value by a factor that converges to 1.
    """
    x = a * ratio
    denominator = x + 1 - a
    numerator_ratio, denominator_ratio = math.inf, 1 / denominator
    value, n = denominator_ratio, 1
    while True:
        coefficient = -n * (n - a)
        denominator += 2
        denominator_ratio = 1 / (coefficient * denominator_ratio + denominator)
        numerator_ratio = denominator + coefficient / numerator_ratio
        step = numerator_ratio * denominator_ratio
        value *= step
        n += 1
        if abs(step - 1) < 1e-15:
            return _log_weight(a, ratio) + math.log(a) + math.log(value)


def _log_weight(a: float, ratio: float) -> float:
    """Return ln(x^a e^-x / Gamma(a+1)) at x = a·ratio.

    For a >= 20 this uses Stirling's series, -a·(ratio - 1 - ln ratio) - ln(2·pi·a)/2 - 1/(12a) + 1/(360a³). The direct
    form subtracts numbers of size a·ln(a) from each other, which loses precision by cancellation.
    """
    if a < 20:
        x = a * ratio
        return a * math.log(x) - x - math.lgamma(a + 1)
    stirling = 1 / (12 * a) - 1 / (360 * a**3) + 1 / (1260 * a**5)
    return -a * (ratio - 1 - math.log1p(ratio - 1)) - math.log(2 * math.pi * a) / 2 - stirling


def _log_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))


def _power(log10: float) -> str:
    if log10 > 6 or log10 < -3:
        exponent = math.floor(log10)
        return f"{10 ** (log10 - exponent):.2g}e{exponent:+d}"
    return f"{10**log10:.3g}"
