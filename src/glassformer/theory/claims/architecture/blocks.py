"""Shapes of a block and of a language model's logits, and why a shape test shows almost nothing."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.model import build
from glassformer.model.block import Block, PreNormBlock
from glassformer.model.context import NO_TAP, AttentionContext, ForwardContext, Tap
from glassformer.reference import random_params
from glassformer.reference.arrays import Array, select_prefix
from glassformer.reference.forward import ForwardContext as OracleContext
from glassformer.reference.forward import block as oracle_block
from glassformer.shapes import Float
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import decoder, refusal, small_config

BATCHES, LENGTHS, WIDTHS = (1, 3), range(1, 17), (8, 48)


class Identity(PreNormBlock):
    """Does nothing."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        return x


class WithoutNorm(PreNormBlock):
    """x + attention(x), x + feedforward(x)."""

    def forward(self, x: Tensor, context: ForwardContext, layer: int, tap: Tap = NO_TAP) -> Tensor:
        x = x + self.attend(x, context, layer, tap)
        return x + self.feed(x, tap)


class WithoutResidual(PreNormBlock):
    """feedforward(norm(attention(norm(x))))."""

    def forward(self, x: Tensor, context: ForwardContext, layer: int, tap: Tap = NO_TAP) -> Tensor:
        assert self.norm_feedforward is not None
        x = self.attend(self.norm_attention(x), context, layer, tap)
        return self.feed(self.norm_feedforward(x), tap)


class FeedForwardFirst(PreNormBlock):
    """The two branches in the other order."""

    def forward(self, x: Tensor, context: ForwardContext, layer: int, tap: Tap = NO_TAP) -> Tensor:
        assert self.norm_feedforward is not None
        x = x + self.feed(self.norm_feedforward(x), tap)
        return x + self.attend(self.norm_attention(x), context, layer, tap)


class SoftmaxOverQueries(PreNormBlock):
    """Columns of the pattern sum to 1 instead of rows."""

    def forward(self, x: Tensor, context: ForwardContext, layer: int, tap: Tap = NO_TAP) -> Tensor:
        assert self.norm_feedforward is not None
        x = x + self._attention_over_queries(self.norm_attention(x))
        return x + self.feed(self.norm_feedforward(x), tap)

    def _attention_over_queries(self, x: Tensor) -> Tensor:
        attention = self.attention
        k, v = attention.project_kv(x)
        q = attention.q(x).unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        pattern = (q @ k.mT * attention.scale).masked_fill(future, -math.inf).softmax(-2)
        out: Tensor = attention.o((pattern @ v).transpose(1, 2).flatten(2))
        return out


MUTANTS: dict[str, type[PreNormBlock]] = {
    "identity": Identity,
    "no norm": WithoutNorm,
    "no residual": WithoutResidual,
    "feed-forward first": FeedForwardFirst,
    "softmax over queries": SoftmaxOverQueries,
}


def make_block(kind: type[Block], width: int, seed: int) -> Block:
    config = small_config(d_model=width, feedforward=c.Dense(4 * width))
    block = kind(config, 0, cross=False).double().eval()
    params = select_prefix(random_params(config, seed), "decoder.blocks.0")
    block.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return block


@torch.no_grad()
def through(block: Block, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    context = ForwardContext(torch.arange(x.shape[1])[None], [AttentionContext(is_causal=x.shape[1] > 1)])
    out: Tensor = block(x, context, 0)
    return out


def by_formulas(width: int, seed: int, x: Float[Tensor, "B T D"]) -> Array:
    """The oracle's block: NumPy, written from the formulas, with the same parameters."""
    config = small_config(d_model=width, feedforward=c.Dense(4 * width))
    params = select_prefix(random_params(config, seed), "decoder.blocks.0")
    B, T, _ = x.shape
    allowed = np.broadcast_to(np.tril(np.ones((T, T), dtype=bool)), (B, T, T))
    around = OracleContext(allowed, None, None, None, None, None)
    return oracle_block(config, params, x.numpy(), around)[0]


def examine(kind: type[Block], lab: Lab) -> tuple[int, float]:
    """Return over all sizes the number of outputs with a wrong shape and the largest difference from the formulas."""
    misshapen, furthest = 0, 0.0
    for width in WIDTHS:
        block = make_block(kind, width, lab.seed)
        for rows in BATCHES:
            for length in LENGTHS:
                x = torch.randn(rows, length, width, generator=lab.torch_rng(length), dtype=torch.float64)
                out = through(block, x)
                misshapen += out.shape != x.shape
                furthest = max(furthest, max_difference(out.numpy(), by_formulas(width, lab.seed, x)))
    return misshapen, furthest


@claim("preln-block-shape")
def preln_block_shape(lab: Lab) -> Iterator[Finding]:
    cases = len(BATCHES) * len(LENGTHS) * len(WIDTHS)
    misshapen, furthest = examine(WithoutResidual if lab.broken else PreNormBlock, lab)
    yield lab.exhaustive("shape", misshapen, cases)
    yield lab.numerical("values", furthest, 1e-10, cases=cases)
    found = {name: examine(kind, lab) for name, kind in MUTANTS.items()}
    rejected = sum(misshapen > 0 for misshapen, _ in found.values())
    yield lab.exhaustive("wrong blocks that the shape test rejects", rejected, len(MUTANTS))
    survivors = sum(furthest <= 1e-10 for _, furthest in found.values())
    shown = {name: float(f"{furthest:.3g}") for name, (_, furthest) in found.items()}
    yield lab.exhaustive("wrong blocks that the values accept", survivors, len(MUTANTS), differences=shown)


@figure("preln-block-shape", "A pre-norm block", height=2.2)
def draw_block(lab: Lab, fig: Figure) -> None:
    boxes = {
        0.6: ("norm", GREY), 1.4: ("multi-head\nattention", COLOURS[0]), 2.9: ("norm", GREY),
        3.7: ("feed-\nforward", COLOURS[1]),
    }  # fmt: skip
    ax = fig.canvas.subplots()
    arrow = {"arrowstyle": "->", "lw": 1.2}
    ax.annotate("", (4.9, 1), (-0.1, 1), arrowprops=arrow)
    for x, (text, colour) in boxes.items():
        ax.text(
            x,
            0,
            text,
            ha="center",
            va="center",
            bbox={"boxstyle": "round", "fc": "white", "ec": colour, "pad": 0.5},
        )
    for start, first, last, half, end in ((0.15, 0.6, 1.4, 0.38, 2.1), (2.4, 2.9, 3.7, 0.29, 4.4)):
        ax.plot([start, start, first - 0.25], [1, 0, 0], color="black", lw=1.2)
        ax.annotate("", (last - half, 0), (first + 0.2, 0), arrowprops=arrow)
        ax.plot([last + half, end], [0, 0], color="black", lw=1.2)
        ax.annotate("", (end, 0.9), (end, 0), arrowprops=arrow)
        ax.text(end, 1, "+", ha="center", va="center", bbox={"boxstyle": "circle", "fc": "white", "ec": "black"})
    for x, text in ((-0.1, "(B,T,D)"), (2.25, "(B,T,D)"), (4.9, "(B,T,D)")):
        ax.text(x, 1.3, text, ha="center")
    ax.set(xlim=(-0.5, 5.3), ylim=(-0.5, 1.6))
    ax.axis("off")


CONTEXT, VOCABULARY = 16, 50


@claim("gpt-logits-shape")
def gpt_logits_shape(lab: Lab) -> Iterator[Finding]:
    position: Any = c.Sinusoidal() if lab.broken else c.Learned()
    model = decoder(seed=lab.seed, vocab_size=VOCABULARY, position=position, max_len=CONTEXT)
    wrong = uneven = 0.0
    for length in range(1, CONTEXT + 1):
        for first in (0, VOCABULARY - 1):
            tokens = (first + torch.arange(3 * length).view(3, length)) % VOCABULARY
            with torch.no_grad():
                logits = model(tokens)
            wrong += logits.shape != (3, length, VOCABULARY) or not bool(logits.isfinite().all())
            uneven = max(uneven, max_difference(logits.softmax(-1).sum(-1), 1))
    yield lab.exhaustive("shape", int(wrong), 2 * CONTEXT)
    yield lab.numerical("probabilities sum to 1", uneven, 1e-14)
    invalid = {
        "one token too many": torch.zeros(1, CONTEXT + 1, dtype=torch.long),
        "id V": torch.full((1, 3), VOCABULARY),
        "id -1": torch.full((1, 3), -1),
        "no token": torch.zeros(1, 0, dtype=torch.long),
    }
    errors = {name: refusal(model, tokens) for name, tokens in invalid.items()}
    yield lab.exhaustive("invalid inputs", sum(not text for text in errors.values()), len(errors), errors=errors)
    yield _initial_loss(lab)


@torch.no_grad()
def _initial_loss(lab: Lab) -> Finding:
    config = small_config(
        vocab_size=VOCABULARY, d_model=64, attention=c.Attention(4), feedforward=c.Dense(256), position=c.Learned(),
        max_len=CONTEXT,
    )  # fmt: skip
    model = build(config, seed=lab.seed)
    text = torch.randint(VOCABULARY, (64, CONTEXT + 1), generator=lab.torch_rng())
    loss = float(F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:]))
    return lab.numerical("initial loss against ln V", abs(loss - math.log(VOCABULARY)), 0.1, loss=loss)
