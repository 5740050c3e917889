"""Layers whose training step computes its matmuls in float8 (fp8.py): feed-forwards, and the projections of
self-attention.

A dense feed-forward is one autograd function from input to output, because the values between its matmuls are cast
where they are computed. Queries, keys and values are one matmul: the casts write the three weights into one matrix
(concatenated along dim 0) and their gradients into another (along dim 1), so nothing is copied to concatenate them. So
are gate and up of a gated feed-forward.

The scale of a norm's output is known in advance, from the parameters of the norm. torch.compile then writes the float8
values where it computes the norm, and never writes the output of the norm itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.kernels.cuda.training.fp8 import (
    E4M3,
    E5M2,
    activate,
    activate_backward,
    cast,
    cast_all,
    matmul,
    mean_square,
    mean_squares,
    pad_rows,
    quantise,
    scale_of,
    transpose,
)
from glassformer.kernels.replacement import Replacement
from glassformer.model import Model
from glassformer.model.attention import Attention
from glassformer.model.block import Block, ParallelBlock, PreNormBlock
from glassformer.model.cache import KV
from glassformer.model.context import NO_TAP, AttentionContext, Tap
from glassformer.model.layers import Dense, Gated, LayerNorm, RMSNorm
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
        up_scale, down_scale = scale_of(squares[0]), scale_of(squares[1])
        x8, x8_transposed, x_scale, x_square = _read(x, expected)
        up8, up8_transposed = cast(w_up, up_scale, E4M3)
        down8, down8_transposed = cast(w_down, down_scale, E4M3)
        pre = matmul(x8, up8, x_scale, up_scale, _bias([b_up]))
        pre_square = x.shape[1] * x_square * squares[0]
        if b_up is not None:
            pre_square = pre_square + squares[2]
        post_scale = scale_of(pre_square.square() if kind == "relu2" else pre_square)
        post8 = activate(pre, post_scale, kind)
        y = matmul(post8, down8, post_scale, down_scale, _bias([b_down]))
        slope = 4 * pre_square if kind == "relu2" else torch.ones_like(pre_square)
        dpre_per_dy = x.shape[1] * squares[1] * slope
        ctx.save_for_backward(
            x8_transposed, pre, up8_transposed, down8_transposed, x_scale, up_scale, down_scale, post_scale, dpre_per_dy
        )
        ctx.kind = kind
        ctx.dtypes = [None if t is None else t.dtype for t in (x, w_up, b_up, w_down, b_down)]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8_transposed, pre, up8_transposed, down8_transposed, x_scale, up_scale, down_scale, post_scale, dpre_per_dy = (
            ctx.saved_tensors
        )
        x_type, up_type, up_bias, down_type, down_bias = ctx.dtypes
        dy = gradients[0].contiguous()
        square = mean_squares([dy], True)[0]
        dy_scale, d_scale = scale_of(square), scale_of(square * dpre_per_dy)
        dy8, dy8_transposed = cast(dy, dy_scale, E5M2)
        d_post = matmul(dy8, down8_transposed, dy_scale, down_scale, None)
        d8, d8_transposed, post8_transposed, sums = activate_backward(
            d_post, pre, d_scale, post_scale, ctx.kind, up_bias is not None
        )
        d_down = matmul(dy8_transposed, post8_transposed, dy_scale, post_scale, None)
        d_up = matmul(d8_transposed, x8_transposed, d_scale, x_scale, None)
        dx = matmul(d8, up8_transposed, d_scale, up_scale, None)
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
    """Several linear layers of one input: x W_i^T + b_i. Arguments: all weights, then all biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, expected: Tensor | None, *given: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = [t for t in given[: len(given) // 2] if t is not None], given[len(given) // 2 :]
        scale = scale_of(_mean_square_of_all(weights, False))
        x8, x8_transposed, x_scale, _ = _read(x, expected)
        w8, w8_transposed = cast_all(weights, scale, E4M3, False, None)
        y = matmul(x8, w8, x_scale, scale, _bias(biases))
        ctx.save_for_backward(x8_transposed, w8_transposed, x_scale, scale)
        ctx.sizes = [len(w) for w in weights]
        ctx.dtypes = [x.dtype, weights[0].dtype, *(None if b is None else b.dtype for b in biases)]
        return y.split(ctx.sizes, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8_transposed, w8_transposed, x_scale, w_scale = ctx.saved_tensors
        x_type, w_type, *bias_types = ctx.dtypes
        dys = [g.contiguous() for g in gradients]
        scale = scale_of(_mean_square_of_all(dys, True))
        d8, d8_transposed = cast_all(dys, scale, E5M2, True, None)
        d_weights = matmul(d8_transposed, x8_transposed, scale, x_scale, None).to(w_type)
        dx = matmul(d8, w8_transposed, scale, w_scale, None)
        sums = (
            None if t is None else d.sum(0, dtype=torch.float32).to(t) for d, t in zip(dys, bias_types, strict=True)
        )
        return dx.to(x_type), None, *d_weights.split(ctx.sizes), *sums


def _read(x: Tensor, expected: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x in e4m3, its transpose, its scale and its mean square, which is measured unless `expected` gives it."""
    square = mean_squares([x], True)[0] if expected is None else expected
    scale = scale_of(square)
    if expected is not None and torch.compiler.is_compiling():
        x8 = quantise(x, scale, E4M3)  # torch.compile fuses the cast with what computes x
        return x8, transpose(x8), scale, square
    return *cast(x, scale, E4M3), scale, square


def _mean_square_of_all(tensors: list[Tensor], sampled: bool) -> Tensor:
    """Return the mean square of all tensors together."""
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
    """Return down(activation(up(x))) in bfloat16, with all six matmuls of its forward and backward pass in float8.

    Tokens are padded with zeros to a multiple of 16; their gradients are zero. `expected` is the mean square of x
    where it is known in advance.
    """
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y: Tensor = _FeedForward.apply(pad_rows(rows), expected, w_up, b_up, w_down, b_down, kind)
        return y[: len(rows)].view(x.shape)


def projections(
    x: Float[Tensor, "*n D"], layers: Sequence[nn.Linear], expected: Float[Tensor, ""] | None = None
) -> list[Tensor]:
    """Return layer(x) of each layer by one matmul, with all matmuls in float8, as `feed_forward`."""
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        parameters = (*(layer.weight for layer in layers), *(layer.bias for layer in layers))
        made: tuple[Tensor, ...] = _Projections.apply(pad_rows(rows), expected, *parameters)
        return [y[: len(rows)].unflatten(0, x.shape[:-1]) for y in made]


Norms = tuple[LayerNorm | RMSNorm, ...]
"""The norm that computes a layer's input, or none. A tuple, so that it is not registered as a submodule."""


def expected_square(norms: Norms) -> Tensor | None:
    """Return the expected mean square of a norm's output, ms(gain) + ms(bias), or None without a norm."""
    if not norms:
        return None
    bias = getattr(norms[0], "bias", None)
    square = mean_square(norms[0].factor().detach())
    return square if bias is None else square + mean_square(bias.detach())


class Float8Dense(Dense):
    """A dense feed-forward with float8 matmuls in training. In evaluation, or with a tap inside, it is a Dense."""

    kind: str
    norms: Norms

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        if not self.training or tap.wants("pre") or tap.wants("post"):
            return Dense.forward(self, x, tap)
        up, down = self.up, self.down
        return feed_forward(x, up.weight, up.bias, down.weight, down.bias, self.kind, expected_square(self.norms))


class Float8Gated(Gated):
    """A gated feed-forward with float8 matmuls in training: gate and up as one, then down."""

    norms: Norms

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        if not self.training or tap.wants("pre") or tap.wants("post"):
            return Gated.forward(self, x, tap)
        gate, up = projections(x, [self.gate, self.up], expected_square(self.norms))
        hidden = self.activation(self.limited_gate(gate)) * self.factor(up)
        return projections(hidden, [self.down])[0]


class Float8Linear(nn.Linear):
    """A linear layer with float8 matmuls in training."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n O"]:
        return projections(x, [self])[0] if self.training else nn.Linear.forward(self, x)


class Float8Attention(Attention):
    """Self-attention with projections in float8 in training. Scores and weighted values keep their dtype.

    In evaluation, with a KV cache, with keys and values from elsewhere, or where positions are added to queries and
    keys alone, it is an Attention.
    """

    norms: Norms

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext = AttentionContext(),
        tap: Tap = NO_TAP,
        kv: KV | None = None,
    ) -> Float[Tensor, "B T D"]:
        if not self.training or context.cache is not None or context.qk_embedding is not None or kv is not None:
            return Attention.forward(self, x, context, tap, kv)
        q, k, v = projections(x, [self.q, self.k, self.v], expected_square(self.norms))
        q = self.prepare(q, self.n_heads, self.q_norm, context.rotation)
        k = self.prepare(k, self.n_kv_heads, self.k_norm, context.rotation)
        return self.attend(q, k, self.prepare(v, self.n_kv_heads), context, tap)


def feedforward_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the dense and gated feed-forwards of all blocks."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if type(block.feedforward) is Gated:
            yield Replacement(block.feedforward, Float8Gated, {"norms": _norms(block, "norm_feedforward")})
        elif type(block.feedforward) is Dense:
            kind = model.config.feedforward.activation  # type: ignore[union-attr]
            attributes = {"kind": kind, "norms": _norms(block, "norm_feedforward")}
            yield Replacement(block.feedforward, Float8Dense, attributes)


def projection_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the self-attention of all blocks, and its output projection."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if type(block.attention) is Attention:
            yield Replacement(block.attention, Float8Attention, {"norms": _norms(block, "norm_attention")})
            yield Replacement(block.attention.o, Float8Linear)


def _norms(block: Block, name: str) -> Norms:
    """Return the norm whose output a part of a block reads. With post-norm, the input is a residual sum."""
    match block:
        case PreNormBlock():
            return (getattr(block, name),)
        case ParallelBlock():
            return (block.norm,)
        case _:
            return ()
