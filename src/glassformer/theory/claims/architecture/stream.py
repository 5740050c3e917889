"""The residual stream: a sum with pre-norm but not with post-norm, and the gradients by depth in both cases."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens import decompose, stream_norms, trace
from glassformer.lens.figure import COLOURS, Figure
from glassformer.model import DecoderLM, Model, build
from glassformer.model.block import Block, build_block
from glassformer.model.context import AttentionContext, ForwardContext
from glassformer.theory.claims.claim import Kind, Lab, claim, figure
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import random_model, random_tokens, small_config

LAYERS = 12
DEPTHS = (2, 4, 8, 16, 32)
SEEDS: dict[c.Placement, int] = {"pre": 4, "post": 16}
"""Post-norm slopes of the input gradient scatter by 0.17 between groups of four seeds, so more are taken."""
WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 16, 64


def _deep(placement: c.Placement, seed: int) -> Model:
    return random_model(small_config(n_layers=LAYERS, placement=placement), seed, std=0.2)


@claim("residual-stream-sum")
def residual_stream_sum(lab: Lab) -> Iterator[Finding]:
    model = _deep("post" if lab.broken else "pre", lab.seed)
    tokens = random_tokens(lab.rng(), 2, 11, 7)
    run = trace(model, tokens, sites=["embed", "*.out", "*.resid_*"])
    writes = [run[f"blocks.{i}.{kind}.out"] for i in range(LAYERS) for kind in ("attention", "feedforward")]
    last, largest = run[f"blocks.{LAYERS - 1}.resid_post"], float(run.stack("blocks.*.resid_post").abs().max())
    gap = float((last - run["embed"] - torch.stack(writes).sum(0)).abs().max())
    yield lab.numerical(
        "stream = embedding + writes", gap, 16 * LAYERS * UNIT * largest, layers=LAYERS, largest=largest
    )
    in_order = run["embed"]
    for write in writes:
        in_order = in_order + write
    yield lab.exact("in the engine's order, bit for bit", torch.equal(in_order, last))
    assert isinstance(model, DecoderLM)
    assert model.head is not None
    table = model.embed.tokens.weight.detach()
    terms = torch.stack([run["embed"], *writes]) @ table.T
    scores = model.head(last, table).detach()
    bound = 16 * (LAYERS + model.config.d_model) * UNIT * float(terms.abs().sum(0).max() + 1)
    apart, bound = max_difference(terms.sum(0), scores), max(bound, 16 * LAYERS * UNIT * largest)
    yield lab.numerical("scores without the final norm = sum of scores of the terms", apart, bound, terms=len(terms))
    if not lab.broken:
        heads = decompose(model, tokens).finding
        assert heads.measured is not None
        yield lab.numerical("heads apart", heads.measured, heads.bound, terms=heads.evidence["terms"])
    yield _post_is_no_sum(lab, tokens)


def _post_is_no_sum(lab: Lab, tokens: Tensor) -> Finding:
    run = trace(_deep("post", lab.seed), tokens, sites=["embed", "*.out", "*.resid_post"])
    writes = run.stack("blocks.*.attention.out").sum(0) + run.stack("blocks.*.feedforward.out").sum(0)
    gap = float((run[f"blocks.{LAYERS - 1}.resid_post"] - run["embed"] - writes).abs().max())
    return lab.numerical("post-norm: the same sum is off", gap, None, low=1e-2)


@figure("residual-stream-sum", "What each layer adds to the residual stream (pre-norm)", height=3.2)
def draw_stream(lab: Lab, fig: Figure) -> None:
    norms = stream_norms(_deep("pre", lab.seed), random_tokens(lab.rng(), 2, 11, 7))
    layers = np.arange(LAYERS)
    ax = fig.canvas.subplots()
    below = np.zeros(LAYERS)
    for kind, colour in (("attention.out", COLOURS[0]), ("feedforward.out", COLOURS[1])):
        values = norms.branches[kind].mean((1, 2)).numpy()
        ax.bar(layers, values, bottom=below, color=colour, width=0.7, label=f"written by {kind.removesuffix('.out')}")
        below = below + values
    ax.plot(np.arange(LAYERS + 1) - 0.5, norms.stream.mean((1, 2)).numpy(), "o-", color="black", markersize=3,
            label="the stream itself")  # fmt: skip
    ax.set(xlabel="layer", ylabel="mean length of the vector", xticks=layers)
    ax.legend(loc="upper left")


class Measured(NamedTuple):
    """At initialisation, geometric means over seeds."""

    input: float
    """Gradient at what the first block reads."""
    last: float
    """Gradient of the last feed-forward's second matrix."""
    variance: float
    """Variance of the residual stream after the last block."""


@lru_cache(maxsize=64)
def at_depth(placement: c.Placement, n_layers: int, seed: int, causal: bool = False) -> Measured:
    """One backward pass per seed through the engine with fan-in weights, unit-normal inputs and random targets."""
    kind = c.DecoderConfig if causal else c.EncoderConfig
    config = kind(
        vocab_size=VOCABULARY, d_model=WIDTH, n_layers=n_layers, attention=c.Attention(HEADS),
        feedforward=c.Dense(4 * WIDTH, "relu"), position=c.NoPosition(), placement=placement,
        head=c.Head(tied=False),
    )  # fmt: skip
    found = np.array([_backward(config, 100 * seed + trial) for trial in range(SEEDS[placement])])
    return Measured(*np.exp(np.log(found).mean(0)).tolist())


def _backward(config: c.ModelConfig, seed: int) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(seed)
    model = build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # a layer after a ReLU needs twice the variance (He et al. 2015)
                gain = 2.0 if name.endswith("down.weight") else 1.0
                std = 1.0 if name.startswith("embed.") else math.sqrt(gain / parameter.shape[1])
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    tokens = torch.arange(LENGTH)[None]  # all different: independent vectors
    targets = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    top = f"blocks.{config.n_layers - 1}.resid_post"
    run = trace(model, tokens, sites=["embed", top], grad=True)
    loss = F.cross_entropy(run.logits[0], targets)
    [last] = [p for n, p in model.named_parameters() if n.endswith(f"{config.n_layers - 1}.feedforward.down.weight")]
    of_input, of_last = torch.autograd.grad(loss, [run["embed"], last])
    return float(of_input.norm()), float(of_last.norm()), float(run[top].detach().var(-1, correction=0).mean())


def slope(values: list[float]) -> float:
    """Least squares of log value over log depth."""
    return float(np.polyfit(np.log(DEPTHS), np.log(values), 1)[0])


@claim("prenorm-vs-postnorm")
def prenorm_vs_postnorm(lab: Lab) -> Iterator[Finding]:
    yield from _identity_at_zero(lab)
    kinds: tuple[c.Placement, c.Placement] = ("post", "pre") if lab.broken else ("pre", "post")
    pre, post = ([at_depth(kind, depth, lab.seed) for depth in DEPTHS] for kind in kinds)
    shown = {"depths": DEPTHS, "seeds": [SEEDS[kind] for kind in kinds]}
    last, first = ([[getattr(m, name) for m in side] for side in (pre, post)] for name in ("last", "input"))
    bands: tuple[tuple[str, list[float], float | None, float], ...] = (
        ("pre-norm, last matrix", last[0], -0.8, -0.3),
        ("post-norm, last matrix", last[1], -0.15, 0.2),
        ("pre-norm, input", first[0], -0.15, 0.1),
        ("post-norm, input", first[1], None, -0.1),
    )
    for name, values, low, high in bands:
        yield lab.empirical(name, slope(values), low, high, gradients=[round(v, 4) for v in values], **shown)
    growth = pre[-1].variance / pre[0].variance
    variances = [round(m.variance, 2) for m in pre]
    yield lab.empirical("pre-norm, the stream grows", growth, 5.0, None, variances=variances, **shown)
    largest = max(abs(m.variance - 1) for m in post)
    yield lab.numerical("post-norm, the stream does not", largest, 1e-4)
    yield _causal_post(lab)


def _causal_post(lab: Lab) -> Finding:
    """The shrinking at the input belongs to unmasked attention: under a causal mask it is within the scatter."""
    if not lab.slow:
        return lab.skipped("post-norm, input, causal", Kind.EMPIRICAL, "eighty more backward passes: run with --slow")
    found = slope([at_depth("post", depth, lab.seed, causal=True).input for depth in DEPTHS])
    return lab.empirical("post-norm, input, causal", found, -0.35, 0.2, depths=DEPTHS, seeds=SEEDS["post"])


def _identity_at_zero(lab: Lab) -> Iterator[Finding]:
    """A block whose matrices are zero: what is left is the path around the branches."""
    for placement in ("pre", "post"):
        config = small_config(placement="post" if lab.broken else placement)
        block = build_block(config, 0).double()
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)

        def through(x: Tensor, block: Block = block) -> Tensor:
            out: Tensor = block(x[None], ForwardContext(torch.arange(3)[None], [AttentionContext(is_causal=True)]), 0)
            return out[0]

        x = torch.randn(3, config.d_model, generator=lab.torch_rng(), dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(through, x)
        assert isinstance(jacobian, Tensor)
        away = float((jacobian.reshape(x.numel(), -1) - torch.eye(x.numel(), dtype=torch.float64)).abs().max())
        if placement == "pre":
            yield lab.exact("pre-norm block of zeros", away == 0.0, away=away)
        else:
            yield lab.numerical("post-norm block of zeros", away, None, low=0.1)
    x, w = sympy.symbols("x w")
    around = x + w * sympy.Function("branch")(x)
    block_of = sympy.Function("norm")(around) if lab.broken else around
    holds = sympy.diff(block_of, x).subs(w, 0).doit() == 1
    yield lab.exact("d(x + w f(x))/dx at w = 0", holds)


@figure("prenorm-vs-postnorm", "Gradients at initialisation by depth", height=3.0)
def draw_gradients(lab: Lab, fig: Figure) -> None:
    axes = fig.canvas.subplots(1, 2, sharex=True)
    for placement, colour in (("pre", COLOURS[0]), ("post", COLOURS[1])):
        found = [at_depth(placement, depth, lab.seed) for depth in DEPTHS]
        for ax, values in zip(axes, ([m.input for m in found], [m.last for m in found]), strict=True):
            ax.loglog(
                DEPTHS,
                values,
                "o-",
                color=colour,
                markersize=4,
                label=f"{placement}-norm, slope {slope(values):.2f}",
            )
    for ax, title in zip(axes, ("at the input of the first block", "last feed-forward matrix"), strict=True):
        ax.set(title=title, xlabel="layers", xticks=DEPTHS)
        ax.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
        ax.set_ylim(0.05, 5)
        ax.set_yticks((0.1, 0.3, 1, 3), ("0.1", "0.3", "1", "3"))
        ax.minorticks_off()
        ax.legend()
    axes[0].set_ylabel("gradient norm")
