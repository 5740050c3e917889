"""Layers whose training step takes its products in 8 bits (fp8.py): dense feed-forwards, and the projections of
self-attention.

A feed-forward is one autograd function, from its input to its output, since what lies between is cast as it is made.
Queries, keys and values are one product: their weights are cast into one matrix, one below the other, and so are their
gradients, one beside the other, so that nothing is copied to bring them together.

What a norm made is cast with a unit that is known beforehand, from the norm's parameters. A compiler then writes the
8 bits where it computes the norm, and never the norm's output itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.kernels.cuda.training.fp8 import (
    E4M3,
    E5M2,
    FAST,
    MULTIPLE,
    activate,
    activate_backward,
    cast,
    cast_all,
    fill_rows,
    mean_square,
    mean_squares,
    product,
    quantise,
    turn,
    unit_of,
)
from glassformer.kernels.cuda.training.joined import JoinedAttention
from glassformer.model import Model
from glassformer.model.attention import Attention
from glassformer.model.block import Block, ParallelBlock, PreNormBlock
from glassformer.model.feedforward import Dense
from glassformer.model.norm import LayerNorm, RMSNorm
from glassformer.model.tap import Tap
from glassformer.shapes import Float


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        expected: Tensor | None,
        w_up: Tensor,
        b_up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        kind: str,
    ) -> Tensor:
        squares = mean_squares([t for t in (w_up, w_down, b_up) if t is not None], False)
        up_unit, down_unit = unit_of(squares[0]), unit_of(squares[1])
        x8, x8_turned, x_unit, x_square = _read(x, expected)
        up8, up8_turned = cast(w_up, up_unit, E4M3)
        down8, down8_turned = cast(w_down, down_unit, E4M3)
        pre = product(x8, up8, x_unit, up_unit, _bias([b_up]), FAST["forward"])
        pre_square = x.shape[1] * x_square * squares[0]
        if b_up is not None:
            pre_square = pre_square + squares[2]
        post_unit = unit_of(pre_square.square() if kind == "relu2" else pre_square)
        post8 = activate(pre, post_unit, kind)
        y = product(post8, down8, post_unit, down_unit, _bias([b_down]), FAST["forward"])
        slope = 4 * pre_square if kind == "relu2" else torch.ones_like(pre_square)
        dpre_per_dy = x.shape[1] * squares[1] * slope
        ctx.save_for_backward(
            x8_turned, pre, up8_turned, down8_turned, x_unit, up_unit, down_unit, post_unit, dpre_per_dy
        )
        ctx.kind = kind
        ctx.dtypes = [None if t is None else t.dtype for t in (x, w_up, b_up, w_down, b_down)]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8_turned, pre, up8_turned, down8_turned, x_unit, up_unit, down_unit, post_unit, dpre_per_dy = ctx.saved_tensors
        x_type, up_type, up_bias, down_type, down_bias = ctx.dtypes
        dy = gradients[0].contiguous()
        square = mean_squares([dy], True)[0]
        dy_unit, d_unit = unit_of(square), unit_of(square * dpre_per_dy)
        dy8, dy8_turned = cast(dy, dy_unit, E5M2)
        d_post = product(dy8, down8_turned, dy_unit, down_unit, None, FAST["inputs"])
        d8, d8_turned, post8_turned, sums = activate_backward(
            d_post, pre, d_unit, post_unit, ctx.kind, up_bias is not None
        )
        d_down = product(dy8_turned, post8_turned, dy_unit, post_unit, None, FAST["weights"])
        d_up = product(d8_turned, x8_turned, d_unit, x_unit, None, FAST["weights"])
        dx = product(d8, up8_turned, d_unit, up_unit, None, FAST["inputs"])
        return (
            dx.to(x_type),
            None,
            d_up.to(up_type),
            None if up_bias is None else sums.to(up_bias),
            d_down.to(down_type),
            None if down_bias is None else dy.sum(0, dtype=torch.float32).to(down_bias),
            None,
        )


class _Projections(torch.autograd.Function):
    """Several linear layers of one input: x W_i^T + b_i, the weights first, then as many biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, expected: Tensor | None, *given: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = [t for t in given[: len(given) // 2] if t is not None], given[len(given) // 2 :]
        unit = unit_of(_mean_square_of_all(weights, False))
        x8, x8_turned, x_unit, _ = _read(x, expected)
        w8, w8_turned = cast_all(weights, unit, E4M3, False, None)
        y = product(x8, w8, x_unit, unit, _bias(biases), FAST["forward"])
        ctx.save_for_backward(x8_turned, w8_turned, x_unit, unit)
        ctx.sizes = [len(w) for w in weights]
        ctx.dtypes = [x.dtype, weights[0].dtype, *(None if b is None else b.dtype for b in biases)]
        return y.split(ctx.sizes, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8_turned, w8_turned, x_unit, w_unit = ctx.saved_tensors
        x_type, w_type, *bias_types = ctx.dtypes
        dys = [g.contiguous() for g in gradients]
        unit = unit_of(_mean_square_of_all(dys, True))
        d8, d8_turned = cast_all(dys, unit, E5M2, True, None)
        d_weights = product(d8_turned, x8_turned, unit, x_unit, None, FAST["weights"]).to(w_type)
        dx = product(d8, w8_turned, unit, w_unit, None, FAST["inputs"])
        sums = (
            None if t is None else d.sum(0, dtype=torch.float32).to(t) for d, t in zip(dys, bias_types, strict=True)
        )
        return dx.to(x_type), None, *d_weights.split(ctx.sizes), *sums


def _read(x: Tensor, expected: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x in e4m3, the same transposed, their unit, its mean square), the last as expected, or measured."""
    square = mean_squares([x], True)[0] if expected is None else expected
    unit = unit_of(square)
    if expected is not None and torch.compiler.is_compiling():
        x8 = quantise(x, unit, E4M3)  # written where x is made
        return x8, turn(x8), unit, square
    return *cast(x, unit, E4M3), unit, square


def _mean_square_of_all(tensors: list[Tensor], sampled: bool) -> Tensor:
    """As if they were one tensor."""
    squares, numbers = mean_squares(tensors, sampled), [t.numel() for t in tensors]
    shares = (ms * (n / sum(numbers)) for ms, n in zip(squares, numbers, strict=True))
    return torch.stack(list(shares)).sum()


def _bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    there = [b.bfloat16() for b in biases if b is not None]
    assert len(there) in (0, len(biases))
    return torch.cat(there) if there else None


def feed_forward(
    x: Float[Tensor, "*n D"],
    w_up: Float[Tensor, "F D"],
    b_up: Float[Tensor, " F"] | None,
    w_down: Float[Tensor, "D F"],
    b_down: Float[Tensor, " D"] | None,
    kind: str,
    expected: Float[Tensor, ""] | None = None,
) -> Float[Tensor, "*n D"]:
    """down(activation(up(x))) with all six products of its forward and backward pass in 8 bits, in bfloat16.

    Rows are filled up with zeros to a multiple of 16; their gradients are zero and add nothing. `expected`: of x, its
    mean square, where that is known.
    """
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y: Tensor = _FeedForward.apply(fill_rows(rows), expected, w_up, b_up, w_down, b_down, kind)
        return y[: len(rows)].view(x.shape)


def projections(
    x: Float[Tensor, "*n D"], layers: Sequence[nn.Linear], expected: Float[Tensor, ""] | None = None
) -> list[Tensor]:
    """layer(x) of each layer by one product; it and those of the gradients in 8 bits, as `feed_forward`."""
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        parameters = (*(layer.weight for layer in layers), *(layer.bias for layer in layers))
        made: tuple[Tensor, ...] = _Projections.apply(fill_rows(rows), expected, *parameters)
        return [y[: len(rows)].unflatten(0, x.shape[:-1]) for y in made]


Norms = tuple[LayerNorm | RMSNorm, ...]
"""What made a layer's input; none, or one. In a tuple, so that it does not become a part of the layer."""


def expected_square(norms: Norms) -> Tensor | None:
    """Of what a norm makes: ms(gain) + ms(bias), where the normed numbers are as large in each column."""
    if not norms:
        return None
    bias = getattr(norms[0], "bias", None)
    square = mean_square(norms[0].weight.detach())
    return square if bias is None else square + mean_square(bias.detach())


class Float8Dense(Dense):
    """A dense feed-forward whose training step takes its products in 8 bits. Evaluated or looked at, it is a Dense."""

    kind: str
    norms: Norms

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        if not self.training or tap.wants("pre") or tap.wants("post"):
            return Dense.forward(self, x, tap)
        up, down = self.up, self.down
        return feed_forward(x, up.weight, up.bias, down.weight, down.bias, self.kind, expected_square(self.norms))


class Float8Linear(nn.Linear):
    """A linear layer whose training step takes its products in 8 bits."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n O"]:
        return projections(x, [self])[0] if self.training else nn.Linear.forward(self, x)


class Float8Attention(JoinedAttention):
    """Self-attention whose training step takes its projections in 8 bits; scores and values stay what they are."""

    norms: Norms

    def products(self, x: Float[Tensor, "B T D"]) -> list[Tensor]:
        return projections(x, [self.q, self.k, self.v], expected_square(self.norms))


def enable(model: Model) -> None:
    """Let the dense feed-forwards of a model train in 8 bits, and its self-attention's projections where their sizes
    allow. Parameters and their names stay."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        feed, attention = block.feedforward, block.attention
        if type(feed) is Dense:
            feed.__class__ = Float8Dense
            feed.kind = model.config.feedforward.activation  # type: ignore[union-attr, assignment]
            feed.norms = _norms(block, "norm_feedforward")  # type: ignore[assignment]
        layers = (attention.q, attention.k, attention.v, attention.o)
        sizes = {size for layer in layers for size in layer.weight.shape}
        if type(attention) is Attention and all(size % MULTIPLE == 0 for size in sizes):
            attention.__class__ = Float8Attention
            attention.norms = _norms(block, "norm_attention")  # type: ignore[assignment]
            attention.o.__class__ = Float8Linear


def _norms(block: Block, name: str) -> Norms:
    """The norm that makes the input of a part of a block, if one of its own does."""
    match block:
        case PreNormBlock():
            return (getattr(block, name),)
        case ParallelBlock():
            return (block.norm,)
        case _:
            return ()
