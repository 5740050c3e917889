"""Rank collapse: the rate at which attention makes all tokens equal, and what slows it down in a real block."""

import math
from collections.abc import Iterator
from functools import cache

import sympy as sp
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import AMOUNT, COLOURS, Figure
from glassformer.lens.rank import Collapse, Variant, collapse, collapse_exact, deviation
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import half_units
from glassformer.theory.claims.theory.attend import attend

LAYERS = (1, 2, 3, 4, 10, 25, 50)
SEEDS = 5


@claim("rank-collapse-rate")
def rank_collapse_rate(lab: Lab) -> Iterator[Finding]:
    norm_rate, variance_rate = math.log(10) / 12, math.log(10) / (12 if lab.broken else 24)
    yield lab.exact("rates in closed form", _closed_forms(variance_rate))
    yield lab.numerical("norm: ln(10)/12", half_units(norm_rate, "0.1918821"), 1, rate=norm_rate)
    yield lab.numerical("variance: ln(10)/24", half_units(variance_rate, "0.09594105"), 1, rate=variance_rate)
    yield lab.exact("less is kept at a higher rate", _monotone())
    kept, allowed = _counter_model(lab)
    yield lab.numerical("an upper bound keeps nothing", kept, 1e-15, bound_at_layer_12=allowed)
    exact = collapse_exact(seed=lab.seed)
    ratios = exact.ratios[4:7]
    for depth, ratio in zip((5, 6, 7), ratios, strict=True):
        yield lab.numerical(
            f"cubic at layer {depth}", ratio, 3.3, low=2.9, log10_deviation=exact.log_deviation, digits=exact.digits
        )
    above = sum(measured > bound for measured, bound in zip(exact.log_deviation[1:], exact.log_bound[1:], strict=True))
    yield lab.numerical("the cubic bound holds", above, 0, log10_bound=exact.log_bound[1:])


def _closed_forms(variance_rate: float) -> bool:
    rate = sp.Symbol("lambda", real=True)
    tenth = sp.Rational(1, 10)
    norm = sp.solve(sp.Eq(sp.exp(-12 * rate), tenth), rate)
    variance = sp.solve(sp.Eq(sp.exp(-12 * rate) ** 2, tenth), rate)
    right = all(sp.simplify(found - sp.log(10) / n) == 0 for n, [found] in ((12, norm), (24, variance)))
    return right and math.isclose(float(variance[0]), variance_rate)


def _monotone() -> bool:
    rate = sp.Symbol("lambda", positive=True)
    falls = all(sp.diff(sp.exp(-n * rate), rate).is_negative for n in (12, 24))
    return bool(falls)


def _counter_model(lab: Lab) -> tuple[float, float]:
    """Return the relative deviation after a layer with uniform attention, and the bound e^(-lambda l) at layer 12."""
    x = torch.randn(6, 6, generator=lab.torch_rng(), dtype=torch.float64)
    averaged = attend(torch.zeros_like(x), x, x)
    return float(deviation(averaged)), math.exp(-12 * math.log(10) / 24)


@figure("rank-collapse-rate", "Relative deviation from equal tokens, pure attention, n = d = 6")
def draw_rate(lab: Lab, fig: Figure) -> None:
    exact = collapse_exact(seed=lab.seed)
    depth = range(len(exact.log_deviation))
    left, right = fig.canvas.subplots(1, 2)
    for ax in (left, right):
        ax.plot(depth, exact.log_deviation, "o-", markersize=4, label="measured, 800 digits")
        for rate, name in ((math.log(10) / 12, "ln(10)/12"), (math.log(10) / 24, "ln(10)/24")):
            ax.plot(depth, [-rate * d / math.log(10) for d in depth], "--", label=f"e^(−λl), λ = {name}")
        ax.set_xlabel("layer l")
        ax.set_xticks(list(depth))
    left.set_ylabel("log₁₀ of the deviation")
    right.set_ylim(-14, 0.5)
    left.set_title("all layers")
    right.set_title("what float64 can see")
    left.legend(loc="lower left")


@cache
def runs(variant: Variant, seed: int) -> tuple[Collapse, ...]:
    """The experiment of one variant at its full size, five seeds from `seed` on."""
    return tuple(collapse(variant, seed=seed + i) for i in range(SEEDS))


BANDS: tuple[tuple[str, Variant, int, float | None, float | None], ...] = (
    ("pure attention at 10", "attention", 10, None, 1e-12),
    ("pure attention at 25", "attention", 25, None, 1e-12),
    ("pure attention at 50", "attention", 50, None, 1e-12),
    ("MLP without a skip at 10", "attention-mlp", 10, None, 1e-12),
    ("A = I at 50", "identity", 50, 0.1, None),
    ("plain skip at 50", "skip", 50, 1e-9, 1e-4),
    ("pre-norm skip at 50", "pre-norm-skip", 50, 0.02, 0.2),
    ("pre-norm skip with MLP at 50", "pre-norm-skip-mlp", 50, 0.03, None),
    ("skip over sqrt(L) at 50", "scaled-skip", 50, 0.5, None),
)
"""Name, variant, layer, least and most sigma_2/sigma_1."""


@claim("rank-collapse-depth")
def rank_collapse_depth(lab: Lab) -> Iterator[Finding]:
    for name, variant, layer, low, high in BANDS:
        shown: Variant = "identity" if lab.broken and variant == "attention" else variant
        ratios = [float(run.ratio[layer]) for run in runs(shown, lab.seed)]
        worst = max(ratios) if high is not None and low is None else min(ratios)
        if low is not None and high is not None:  # the value nearest to leaving the band, by ratio
            worst = max(ratios, key=lambda r: max(low / r, r / high))
        yield lab.numerical(
            name,
            worst,
            high,
            low=low,
            seeds=ratios,
            by_layer={str(k): float(runs(shown, lab.seed)[0].ratio[k]) for k in LAYERS},
        )
    pure: Variant = "identity" if lab.broken else "attention"
    away = {k: max(float(run.deviation[k]) for run in runs(pure, lab.seed)) for k in (1, 2, 3, 4, 5)}
    yield lab.numerical("equal rows by layer 5", away[5], 1e-14, by_layer={str(k): v for k, v in away.items()})
    spread = min(float(run.deviation[50]) for run in runs("identity", lab.seed))
    yield lab.numerical(
        "the ratio alone is not uniformity",
        spread,
        None,
        low=0.9,
        ratio=[float(run.ratio[50]) for run in runs("identity", lab.seed)],
    )
    late = [[float(run.singular_values[k][0]) for k in (10, 25, 50)] for run in runs(pure, lab.seed)]
    yield lab.numerical(
        "sigma_1 itself drifts", max(max(values) / min(values) for values in late), None, low=1.5, sigma_1=late
    )


@figure("rank-collapse-depth", "Fifty random layers, n = 32 tokens of width d = 64", height=3.9)
def draw_depth(lab: Lab, fig: Figure) -> None:
    import matplotlib as mpl

    names: dict[Variant, str] = {
        "attention": "attention alone",
        "attention-mlp": "attention + MLP",
        "skip": "skip",
        "pre-norm-skip": "pre-norm skip",
        "pre-norm-skip-mlp": "pre-norm skip + MLP",
        "scaled-skip": "skip / √L",
    }
    left, right = fig.canvas.subplots(1, 2)
    pure = runs("attention", lab.seed)[0]
    colours = mpl.colormaps[AMOUNT]
    for i, layer in enumerate(LAYERS):
        sigma = pure.singular_values[layer]
        index = range(1, len(sigma) + 1)
        colour = colours(0.92 * i / (len(LAYERS) - 1))
        left.plot(index, (sigma / sigma[0]).clamp(min=1e-18), color=colour, label=f"layer {layer}")
    for i, (variant, label) in enumerate(names.items()):
        right.plot(
            runs(variant, lab.seed)[0].deviation.clamp(min=1e-18),
            color=COLOURS[i],
            label=label,
            linestyle="--" if variant == "attention-mlp" else "-",
        )
    for ax, title in ((left, "attention alone: singular values"), (right, "distance to equal tokens")):
        ax.set_yscale("log")
        ax.set_ylim(1e-18, 5)
        ax.set_title(title)
    left.set_xlabel("index of the singular value")
    left.set_ylabel("over the largest")
    right.set_xlabel("layer")
    right.set_ylabel("‖H − 1 meanᵀ‖ / ‖H‖")
    left.legend(loc="upper center", ncols=4, bbox_to_anchor=(0.5, -0.17), columnspacing=0.8, handlelength=1)
    right.legend(loc="center right", bbox_to_anchor=(1.0, 0.37))
