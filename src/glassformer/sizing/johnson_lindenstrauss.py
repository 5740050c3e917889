"""How many dimensions keep the distances of m points within a factor 1 ± eps under a random projection.

Three answers, each sufficient, none a minimum:

* 8·ln(m)/eps²: the form taught most often, for small eps;
* 4·ln(m)/(eps²/2 - eps³/3): Dasgupta and Gupta 2003, theorem 2.1, for squared distances;
* the exact union bound. For a Gaussian projection |Ax|²/|x|² is chi²_k/k, so the chance that any of the C(m,2) pairs
  leaves its bounds is at most C(m,2)·P(chi²_k/k outside [lo, hi]); the least k that brings this to delta. Bounds on the
  squared distance are 1 ± eps, bounds on the distance itself (1 ± eps)² on its square.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from glassformer.sizing.layout import beside, columns, fit


@dataclass(frozen=True)
class JohnsonLindenstrauss:
    """Sufficient dimensions for `points` points at distortion `eps`; see the module for the four rules."""

    points: int
    eps: float
    delta: float
    formula: int
    """ceil(8·ln(m)/eps²)."""
    strict: int
    """ceil(4·ln(m)/(eps²/2 - eps³/3))."""
    exact_squared: int
    """Least k whose union bound on squared distances is at most delta."""
    exact_distance: int
    """Least k whose union bound on distances is at most delta."""
    log10_failure_squared: float
    """log10 of the union bound at k = formula, squared distances; above 0 the bound says nothing."""
    log10_failure_distance: float
    """log10 of the union bound at k = formula, distances."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self, width: int | None = None) -> str:
        """The four rules for a person; what would go beyond `width` stands below."""
        m, eps = f"{self.points:,}", f"{self.eps:g}"
        chance = f"fails with probability ≤ {self.delta:g}"
        rules = [
            (f"8·ln(m)/eps² = 8·ln({self.points:.4g})/{eps}²", self.formula, "small-eps form"),
            (f"4·ln(m)/(eps²/2 − eps³/3), eps = {eps}", self.strict, "squared distances, Dasgupta and Gupta"),
            ("exact chi² union bound, squared distances", self.exact_squared, chance),
            ("exact chi² union bound, distances", self.exact_distance, chance),
        ]
        title = f"Johnson–Lindenstrauss: {m} points, distances kept within 1 ± {eps}"
        numbers = columns([(rule, f"{k:,}") for rule, k, _ in rules], width)
        failure = (
            f"  At k = {self.formula:,} the union bound on failure is {_power(self.log10_failure_squared)} for squared "
            f"distances and {_power(self.log10_failure_distance)} for distances."
        )
        meaning = (
            "  Each k suffices for a random projection; none is a minimum. Learned embeddings are no such projection."
        )
        lines = [beside(line, note, width) for line, (_, _, note) in zip(numbers, rules, strict=True)]
        return "\n".join([fit(title, width), "", *lines, "", *(fit(said, width, "  ") for said in (failure, meaning))])


def johnson_lindenstrauss(points: float, eps: float, delta: float = 0.01) -> JohnsonLindenstrauss:
    """Sufficient dimensions for `points` points: 1e12 at eps = 0.1 give 22,105; 23,684; 23,821 and 5,764.

    The exact bounds take about 35/eps terms each: 0.05 s at eps = 0.001, and ten times as long for each further digit.
    """
    if not (math.isfinite(points) and points >= 2 and points == int(points)):
        raise ValueError(f"points={points} must be a whole number of at least 2: a distance needs two points.")
    if not 0 < eps < 1:
        raise ValueError(f"eps={eps} must lie strictly between 0 and 1, for example 0.1 for ten per cent.")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} is a probability of failure and must lie strictly between 0 and 1.")
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
    """ln of C(m,2)·P(chi²_k/k < low or > high)."""
    log_pairs = math.log(points) + math.log(points - 1) - math.log(2)
    return log_pairs + _log_add(log_gamma_lower(k / 2, low), log_gamma_upper(k / 2, high))


def _least_dimension(points: float, low: float, high: float, delta: float) -> int:
    """Least k with union bound <= delta. ln of the bound is nearly a straight line in k, so a secant finds it fast."""
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
        bisect = not bisect and min(k - fails, passes - k) < (passes - fails) // 8  # a secant that crawls from one end
        if excess > 0:
            fails, excess_fails = k, excess
        else:
            passes, excess_passes = k, excess
    return passes


# The regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x) as logarithms, with x = a·ratio: the
# tails wanted here are near 1e-26, far below what 1 - P can resolve. Numerical Recipes 6.2 has both expansions.


def log_gamma_lower(a: float, ratio: float) -> float:
    """ln P(a, a·ratio) for ratio < 1 by the series x^a e^-x / Gamma(a+1) · (1 + x/(a+1) + x²/((a+1)(a+2)) + ...)."""
    x, term, total, n = a * ratio, 1.0, 1.0, 1
    while term > total * 1e-17:
        term *= x / (a + n)
        total += term
        n += 1
    return _log_weight(a, ratio) + math.log(total)


def log_gamma_upper(a: float, ratio: float) -> float:
    """ln Q(a, a·ratio) for ratio > 1.

    The continued fraction x^a e^-x / Gamma(a) · 1/(x+1-a - 1(1-a)/(x+3-a - 2(2-a)/(x+5-a - ...))), evaluated from the
    front (Lentz): each step multiplies the value so far by a factor that tends to 1.
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
    """ln(x^a e^-x / Gamma(a+1)) at x = a·ratio.

    Beyond a = 20 through Stirling's series, -a·(ratio - 1 - ln ratio) - ln(2·pi·a)/2 - 1/(12a) + 1/(360a³): the direct
    form subtracts numbers of size a·ln(a) from each other and loses as many digits.
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
