"""Two heads do what one cannot: the difference of two tokens."""

import math
from collections.abc import Iterator
from typing import Any

import sympy
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import Figure
from glassformer.model import build
from glassformer.sizing import count_by_part
from glassformer.theory.claims.claim import Lab, claim, figure, impossible, possible, solve
from glassformer.theory.claims.weights.layer import Notes, layer, normal, run, shape

TOKENS, WIDTH = 6, 4
FIRST, SECOND = 1, 4
"""The two positions whose difference is wanted."""


@claim("multihead-separation")
def separation(lab: Lab) -> Iterator[Finding]:
    yield solve(lab, "one head cannot", lambda z3: _one_head_fails(z3, 0.0, lab.broken))
    yield _by_signs(lab)
    yield solve(lab, "one head misses by 1", lambda z3: _one_head_fails(z3, 1.0, lab.broken))
    yield solve(lab, "two heads can", _two_heads_do)
    yield solve(lab, "bound of one head", _bound)
    for gap in (5.0, 10.0, 30.0):
        x = normal(lab.torch_rng(int(gap)), TOKENS, WIDTH)
        out = difference(x, gap, one_head=lab.broken)["out"]
        error = float((out - (x[FIRST] - x[SECOND])).norm(dim=-1).max())
        bound = 4 * (TOKENS - 1) * math.exp(-gap) * float(x.norm(dim=-1).max())
        yield lab.numerical(f"engine, gap {gap:g}", error, bound, tokens=TOKENS, width=WIDTH)
    yield _same_cost(lab)


def _one_head_fails(z3: Any, error: float, any_sign: bool) -> bool:
    """No weights alpha, beta and value map w come within `error` (0: reach) of x_a - x_b on both inputs."""
    alpha, beta, w = z3.Reals("alpha beta w")
    weights = [] if any_sign else [alpha >= 0, alpha <= 1, beta >= 0, beta <= 1]
    if error:
        near = [alpha * w - 1 < error, alpha * w - 1 > -error, beta * w + 1 < error, beta * w + 1 > -error]
    else:
        near = [alpha * w == 1, beta * w == -1]
    return impossible(z3, *weights, *near)


def _by_signs(lab: Lab) -> Finding:
    """The same without a solver: (alpha w)(beta w) = alpha beta w^2 would have to be -1."""
    alpha, beta = sympy.symbols("alpha beta", **({"real": True} if lab.broken else {"nonnegative": True}))
    w = sympy.Symbol("w", real=True)
    never_negative = sympy.expand((alpha * w) * (beta * w)).is_nonnegative is True
    return lab.exact("one head cannot, by signs", never_negative)


def _two_heads_do(z3: Any) -> bool:
    a, b, first, second = z3.Reals("a b first second")
    exact = z3.ForAll([a, b], first * a + second * b == a - b)
    return possible(z3, exact, first == 1, second == -1)


def _bound(z3: Any) -> bool:
    """|y - x_a| = s |others - x_a| / (1 + s) <= 2 s, for |x| <= 1; `others` is the mean of the other tokens."""
    s, others, own = z3.Reals("s others own")
    within = [s > 0, others >= -1, others <= 1, own >= -1, own <= 1]
    miss = s * (others - own)
    return impossible(z3, *within, z3.Or(miss > 2 * s * (1 + s), -miss > 2 * s * (1 + s)))


def difference(x: torch.Tensor, gap: float, one_head: bool = False) -> Notes:
    """The engine's layer whose first head reads position FIRST and whose second subtracts position SECOND.

    Queries and keys are 0, so that scores are the bias alone: `gap` at the wanted position, 0 elsewhere. `one_head`
    gives both heads the scores of the first, as one head would have them.
    """
    width = x.shape[1]
    eye, nothing = torch.eye(width, dtype=torch.float64), torch.zeros(width, 2, dtype=torch.float64)
    attention = layer(nothing, nothing, torch.cat([eye, eye], dim=1), torch.cat([eye, -eye]), n_heads=2)
    bias = torch.zeros(2, len(x), len(x), dtype=torch.float64)
    bias[0, :, FIRST] = bias[1, :, FIRST if one_head else SECOND] = gap
    return run(attention, x, bias=bias)


def _same_cost(lab: Lab) -> Finding:
    counts, agree = {}, True
    for heads in (1, 2, 4, 8):
        config = shape(16, heads, 16 // heads, 16 // heads)
        parameters = build(config).named_parameters()
        counts[heads] = sum(p.numel() for name, p in parameters if ".attention." in name)
        agree &= counts[heads] == count_by_part(config)["attention"]
    return lab.exact("cost", agree and set(counts.values()) == {4 * 16**2}, parameters=counts, width=16)


@figure("multihead-separation", f"One head reads token {FIRST}, the other subtracts token {SECOND}", height=2.7)
def draw_difference(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_attention, draw_map

    x = normal(lab.torch_rng(30), TOKENS, WIDTH)
    seen = difference(x, 6.0)
    pattern, out = seen["pattern"], seen["out"]
    axes = fig.canvas.subplots(1, 4, width_ratios=[6, 6, 4, 4])
    for head in range(2):
        shown = draw_attention(axes[head], pattern[head])
        axes[head].set(title=f"pattern, head {head}", xlabel="key")
        axes[head].set_xticks(range(TOKENS))
    axes[0].set_ylabel("query")
    fig.canvas.colorbar(shown, ax=axes[:2], location="bottom", shrink=0.5, label="weight", ticks=[0, 0.1, 0.5, 1])
    limit = float(max(x.abs().max(), out.abs().max()))
    for ax, values, title in ((axes[2], x, "tokens"), (axes[3], out, "output")):
        signed = draw_map(ax, values, -limit, limit)
        ax.set(title=title, xlabel="component")
        ax.set_xticks(range(WIDTH))
    fig.canvas.colorbar(signed, ax=axes[2:], location="bottom", shrink=0.7, label="value")
    for ax in axes:
        ax.set_yticks(range(TOKENS))
