"""How many scalars a block holds, and what share of them the feed-forward takes, dense or as experts."""

from collections.abc import Iterator
from fractions import Fraction

import sympy as sp
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.model import NO_TAP, build, n_parameters
from glassformer.model.block import Block
from glassformer.model.moe import MoE
from glassformer.sizing import active, count_by_part
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import one_layer

CASES = ((512, 2048, 8), (512, 2048, 1), (48, 100, 4))
"""(d, f, H)."""


def block_config(d: int, f: int, heads: int, bias: bool = True) -> c.DecoderConfig:
    """A decoder of one block; nothing outside the block matters here."""
    return one_layer(
        c.DecoderConfig, d_model=d, attention=c.Attention(heads, bias=bias), feedforward=c.Dense(f, bias=bias)
    )


def moe_config(d: int, experts: int, active: int, width: int = 4, normalize: bool = True) -> c.DecoderConfig:
    """One block without biases whose feed-forward is `experts` experts of width `width`·d."""
    expert = c.Dense(width * d, "gelu_tanh", bias=False)
    return one_layer(
        c.DecoderConfig,
        d_model=d,
        attention=c.Attention(1, bias=False),
        feedforward=c.MoE(experts, active, expert, normalize),
    )


def formula(d: int, f: int) -> tuple[int, int, int]:
    """(4d²+4d, 2df+d+f, 4d): attention, feed-forward, two LayerNorms, every linear map with its bias."""
    return 4 * d * d + 4 * d, 2 * d * f + d + f, 4 * d


def engine_counts(config: c.DecoderConfig) -> tuple[int, int, int]:
    """The same three numbers from the block the engine builds."""
    block = build(config, device="meta").blocks[0]
    assert isinstance(block, Block)
    attention, feedforward = (n_parameters(part) for part in (block.attention, block.feedforward) if part is not None)
    return attention, feedforward, n_parameters(block) - attention - feedforward


@claim("block-param-count")
def block_param_count(lab: Lab) -> Iterator[Finding]:
    wrong = [
        (case, formula(*case[:2]), engine_counts(block_config(*case, bias=not lab.broken)))
        for case in CASES
        if formula(*case[:2]) != engine_counts(block_config(*case, bias=not lab.broken))
    ]
    yield lab.exact(
        "formula = engine",
        not wrong,
        differences=[str(w) for w in wrong],
        counted={str(case): engine_counts(block_config(*case)) for case in CASES},
    )
    weights = engine_counts(block_config(512, 2048, 8, bias=False))
    share = Fraction(weights[1], weights[0] + weights[1])
    yield lab.exact(
        "weights alone at d = 512, f = 2048",
        weights[:2] == (1_048_576, 2_097_152) and sum(weights[:2]) == 3_145_728 and share == Fraction(2, 3),
        attention=weights[0],
        feedforward=weights[1],
        share=str(share),
    )
    full = engine_counts(block_config(512, 2048, 8, bias=not lab.broken))
    yield lab.exact(
        "with biases and norms",
        full == (1_050_624, 2_099_712, 2_048) and sum(full) == 3_152_384,
        counted=full,
        total=sum(full),
    )
    yield lab.exact(
        "feed-forward share with biases",
        round(Fraction(full[1], sum(full)), 7) == Fraction("0.6660711"),
        share=full[1] / sum(full),
    )
    yield lab.exact(
        "2/3 needs f = 4d", _share_is_two_thirds_only_at_4d(), solved="2f/(4d+2f) = 2/3 has the one solution f = 4d"
    )
    heads = [h for h in range(1, 513) if 512 % h == 0]
    counts = {engine_counts(block_config(512, 2048, h)) for h in heads}
    yield lab.exhaustive("H does not enter", len(counts) - 1, len(heads), heads=heads)
    sheet = count_by_part(block_config(512, 2048, 8))
    yield lab.exact(
        "the size sheet agrees", (sheet["attention"], sheet["feedforward"]) == (1_050_624, 2_099_712), sheet=sheet
    )


def _share_is_two_thirds_only_at_4d() -> bool:
    d, f = sp.symbols("d f", positive=True)
    solutions = sp.solve(sp.Eq(2 * d * f / (4 * d**2 + 2 * d * f), sp.Rational(2, 3)), f)
    return solutions == [4 * d]


@figure("block-param-count", "Scalars of one block, d = 512")
def draw_block(lab: Lab, fig: Figure) -> None:
    d, ratios = 512, (1, 2, 4, 8)
    ax = fig.canvas.subplots()
    parts = [formula(d, r * d) for r in ratios]
    bottom = [0.0] * len(ratios)
    labels = ("attention 4d² + 4d", "feed-forward 2df + d + f", "two LayerNorms 4d (too thin to see)")
    for index, label in enumerate(labels):
        heights = [p[index] / 1e6 for p in parts]
        ax.bar(range(len(ratios)), heights, 0.6, bottom=bottom, color=COLOURS[index], label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for x, (p, top) in enumerate(zip(parts, bottom, strict=True)):
        ax.text(x, top + 0.08, f"{sum(p):,}\nfeed-forward {p[1] / sum(p):.1%}", ha="center", va="bottom", fontsize=8)
    ax.set_xticks(range(len(ratios)), [f"f = {r}d" if r > 1 else "f = d" for r in ratios])
    ax.set_ylim(0, max(bottom) * 1.18)
    ax.set_ylabel("million scalars")
    ax.legend(loc="upper left")


@claim("moe-ffn-fraction")
def moe_ffn_fraction(lab: Lab) -> Iterator[Finding]:
    width = 2 if lab.broken else 4
    stated = {1: 0.6667, 2: 0.8, 4: 0.8889, 8: 0.9412}
    shares = {}
    for experts in stated:
        attention, feedforward, _ = engine_counts(moe_config(64, experts, 1, width))
        router = 64 * experts
        shares[experts] = Fraction(feedforward - router, attention + feedforward - router)
    yield lab.exhaustive(
        "share of all experts",
        sum(shares[e] != Fraction(2 * e, 2 * e + 1) or round(float(shares[e]), 4) != stated[e] for e in stated),
        len(stated),
        shares={e: str(s) for e, s in shares.items()},
    )
    visited = {k: _visited_share(k, width) for k in (1, 2, 4)}
    yield lab.exhaustive(
        "share of what one token visits",
        sum(visited[k] != Fraction(2 * k, 2 * k + 1) for k in visited),
        len(visited),
        shares={k: str(s) for k, s in visited.items()},
    )
    config = moe_config(64, 8, 2, width)
    attention, feedforward, _ = engine_counts(config)
    idle = Fraction(6, 8) * (feedforward - 64 * 8)
    yield lab.exact(
        "the size sheet's active count",
        active(config) == n_parameters(build(config, device="meta")) - idle,
        active=active(config),
    )
    yield lab.exact("gates of the chosen experts sum to one", _gates_sum_to_one())
    error, bound = _identical_experts_error(lab)
    yield lab.numerical("identical experts = the dense feed-forward", error, bound)


def _gates_sum_to_one() -> bool:
    chosen, output = sp.symbols("p1:4", positive=True), sp.Symbol("y")
    mixed = sum(p / sum(chosen) * output for p in chosen)
    return sp.simplify(mixed - output) == 0


def _visited_share(chosen: int, width: int) -> Fraction:
    """FFN share among the weights that one token's output depends on: those with a gradient that is not zero."""
    d, experts = 16, 8
    block = build(moe_config(d, experts, chosen, width), dtype=torch.float64).blocks[0]
    assert isinstance(block, Block)
    moe = block.feedforward
    assert isinstance(moe, MoE)
    token = torch.randn(1, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moe(token, NO_TAP).sum().backward()
    used = sum(
        n_parameters(e) for e in moe.experts if any(p.grad is not None and bool(p.grad.any()) for p in e.parameters())
    )
    return Fraction(used, used + n_parameters(block.attention))


def _identical_experts_error(lab: Lab) -> tuple[float, float]:
    """Largest difference between a mixture of copies of one expert and that expert, over top-1 and top-2 routing."""
    d, worst = 16, 0.0
    for chosen in (1, 2):
        config = moe_config(d, 4, chosen, normalize=not lab.broken)
        model = build(config, seed=lab.seed, dtype=torch.float64)
        moe = model.blocks[0].get_submodule("feedforward")
        assert isinstance(moe, MoE)
        state = {name: 30 * value for name, value in moe.experts[0].state_dict().items()}  # outputs of size one
        for expert in moe.experts:
            expert.load_state_dict(state)
        x = torch.randn(50, d, dtype=torch.float64, generator=lab.torch_rng())
        with torch.no_grad():
            worst = max(worst, max_difference(moe(x, NO_TAP), moe.experts[0](x, NO_TAP)))
    return worst, 1e-12


@figure("moe-ffn-fraction", "Feed-forward share of a block's weights, f = 4d")
def draw_moe(lab: Lab, fig: Figure) -> None:
    experts = (1, 2, 4, 8, 16, 32, 64)
    ax = fig.canvas.subplots()
    ax.plot(experts, [2 * e / (2 * e + 1) for e in experts], "o-")
    ax.text(17, 0.955, "all experts: 2E/(2E + 1)", va="top")
    for k in (1, 2):
        reach = [e for e in experts if e >= k]
        level = 2 * k / (2 * k + 1)
        ax.plot(reach, [level] * len(reach), "s--", markersize=4)
        ax.text(16, level + 0.008, f"active with top-{k}: 2·{k}/(2·{k} + 1)", ha="center", va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_xticks(experts, [str(e) for e in experts])
    ax.set_ylim(0.6, 1.01)
    ax.set_xlabel("experts E")
    ax.set_ylabel("share of the weights")
