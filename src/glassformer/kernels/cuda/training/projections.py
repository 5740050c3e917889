"""Matmuls of training steps and their gradients, in bfloat16: linear layers of one input, and feed-forwards.

Linear layers of one input are one matmul, if their copies in bfloat16 are (`copies`). Gradients of weights are matmuls
too, of bfloat16 with float32 sums, kept in the dtype that the optimizer wants.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.cuda.training import between
from glassformer.kernels.cuda.training.copies import gradient_dtype, in_bfloat16
from glassformer.kernels.toolchain import cublaslt
from glassformer.model.positions import Rotation

EPILOGUE = "gelu_tanh"
"""The activation that matmuls of cuBLASLt compute with their results."""


def _weight_gradient(d_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d_out^T x, of bfloat16 (N,F) and (N,D), in bfloat16 or float32."""
    if dtype is torch.bfloat16 or d_out.device.type != "cuda":
        return (d_out.t() @ x).to(dtype)
    return torch.mm(d_out.t(), x, out_dtype=torch.float32)


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix of its last dimension."""
    return x.reshape(-1, x.shape[-1])


class _Project(torch.autograd.Function):
    """Linear layers of one input as one matmul. The first heads of the result are rotated, if there is a rotation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: int, width: int, rotation: Rotation | None, *given: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = [t for t in given if t.dim() == 2], [t for t in given if t.dim() == 1]
        ctx.sizes, ctx.biased = [len(w) for w in weights], bool(biases)
        x, weight = x.to(torch.bfloat16), in_bfloat16(*weights)
        ctx.dtypes = {gradient_dtype(w) for w in weights}
        out = F.linear(x, weight, in_bfloat16(*biases) if biases else None)
        waves = [] if rotation is None else [wave.flatten(1, 2).contiguous() for wave in (rotation.cos, rotation.sin)]
        ctx.halves, ctx.heads, ctx.width = rotation is not None and rotation.pairing == "halves", heads, width
        if waves:
            between.rotate(out, out, heads, width, waves, ctx.halves, 1.0)
        ctx.save_for_backward(x, weight, *waves)
        return out.split(ctx.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *waves = ctx.saved_tensors
        d_out = side_by_side(gradients)
        if waves:  # in place: nothing else reads the gradients of rotated heads
            between.rotate(d_out, d_out, ctx.heads, ctx.width, waves, ctx.halves, -1.0)
        rows = _rows(d_out)
        d_biases = between.column_sums([rows])[0].split(ctx.sizes) if ctx.biased else ()
        d_weights = _weight_gradient(rows, _rows(x), _common(ctx.dtypes)).split(ctx.sizes)
        return (rows @ weight).view_as(x), None, None, None, *d_weights, *d_biases


class _ProjectApart(torch.autograd.Function):
    """Linear layers of one input as a matmul each, whose gradients of the input the matmuls add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        x, pairs = x.to(torch.bfloat16), _pairs(weights_and_biases)
        ctx.biased = [bias is not None for _, bias in pairs]
        inner = [(in_bfloat16(w), None if b is None else in_bfloat16(b)) for w, b in pairs]
        ctx.dtypes = [gradient_dtype(weight) for weight, _ in pairs]
        ctx.save_for_backward(x, *(weight for weight, _ in inner))
        return tuple(F.linear(x, *pair) for pair in inner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_outs = [_rows(gradient) for gradient in gradients]
        d_biases = iter(between.column_sums([d for d, biased in zip(d_outs, ctx.biased, strict=True) if biased]))
        d_x, found = _input_and_weight_gradients(x, d_outs, weights, ctx.dtypes)
        pairs = ((w, next(d_biases) if biased else None) for w, biased in zip(found, ctx.biased, strict=True))
        return d_x, *(gradient for pair in pairs for gradient in pair)


def _pairs(given: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    """Return weights and biases in pairs."""
    return [(w, b) for w, b in zip(given[::2], given[1::2], strict=True) if w is not None]


def _input_and_weight_gradients(
    x: Tensor, d_outs: Sequence[Tensor], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of x and of the weights of matmuls of x. The matmuls add those of x."""
    rows, d_x = _rows(x), None
    for d_out, weight in zip(d_outs, weights, strict=True):
        d_x = d_out @ weight if d_x is None else d_x.addmm_(d_out, weight)
    assert d_x is not None
    return d_x.view_as(x), [_weight_gradient(d, rows, dtype) for d, dtype in zip(d_outs, dtypes, strict=True)]


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return parts (B,T,C) of a tensor as that tensor; a copy if they are not next to each other in memory."""
    first, columns = parts[0], sum(part.shape[-1] for part in parts)
    strides, offset = (first.shape[1] * columns, columns, 1), first.storage_offset()
    for part in parts:
        memory = part.untyped_storage().data_ptr(), part.storage_offset()
        if part.stride() != strides or memory != (first.untyped_storage().data_ptr(), offset):
            return torch.cat(list(parts), -1)
        offset += part.shape[-1]
    return first.as_strided((*first.shape[:2], columns), strides)


def project(
    x: Tensor, *layers: nn.Linear, heads: int = 0, width: int = 0, rotation: Rotation | None = None
) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers of one input (B,T,D) in bfloat16, by one matmul.

    Of the outputs together, the first `heads` heads of a `width` are rotated. `can_join` must hold for the layers.
    """
    biases = [layer.bias for layer in layers if layer.bias is not None]
    out: tuple[Tensor, ...] = _Project.apply(x, heads, width, rotation, *(layer.weight for layer in layers), *biases)
    return out


def project_apart(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers of one input in bfloat16, by a matmul each."""
    out: tuple[Tensor, ...] = _ProjectApart.apply(x, *(t for layer in layers for t in (layer.weight, layer.bias)))
    return out


def project_without_bias(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return the output of a linear layer without its bias, in bfloat16."""
    out: Tensor = _ProjectApart.apply(x, layer.weight, None)[0]
    return out


def can_join(layers: Sequence[nn.Linear]) -> bool:
    """Return whether layers can be one matmul: rows of whole 16 bytes, a bias in all or in none."""
    return len({layer.bias is None for layer in layers}) == 1 and not any(len(n.weight) % between.EACH for n in layers)


class _FeedForward(torch.autograd.Function):
    """down(activation(gate(x)) * up(x)), or down(activation(gate(x))) without `up`; the bias of `down` is left out.

    gate(x) and up(x) are parts of one matrix, and so are their gradients. `given`: the weights, and the biases if any.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, down: Tensor, *given: Tensor) -> Tensor:
        weights, biases = [t for t in given if t.dim() == 2], [t for t in given if t.dim() == 1]
        x, w_inner, w_down = x.to(torch.bfloat16), in_bfloat16(*weights), in_bfloat16(down)
        bias = in_bfloat16(*biases) if biases else None
        ctx.kind, ctx.biased, ctx.sizes = kind, bool(biases), [len(w) for w in weights]
        ctx.dtypes = gradient_dtype(down), {gradient_dtype(w) for w in weights}
        if len(weights) == 1 and kind == EPILOGUE and cublaslt.supports(_rows(x), w_inner, w_down):
            hidden, inner = (t.view(*x.shape[:-1], -1) for t in cublaslt.gelu_linear(_rows(x), w_inner, bias))
        else:
            inner = F.linear(x, w_inner, bias)
            hidden = between.activation_forward(*_gate_and_up(inner, ctx.sizes), kind)
        ctx.save_for_backward(x, inner, hidden, w_inner, w_down)
        return F.linear(hidden, w_down)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, hidden, w_inner, w_down = ctx.saved_tensors
        d_out, (of_down, of_inner) = _rows(gradients[0]).contiguous(), ctx.dtypes
        d_down = _weight_gradient(d_out, _rows(hidden), of_down)
        if len(ctx.sizes) == 1 and ctx.kind == EPILOGUE and cublaslt.supports(d_out, w_down, _rows(inner)):
            d_inner = cublaslt.gelu_backward(d_out, w_down, _rows(inner))
            d_biases = between.column_sums([d_inner]) if ctx.biased else []
        else:
            gate, up = _gate_and_up(inner, ctx.sizes)
            d_inner, d_biases = between.activation_backward(
                (d_out @ w_down).view_as(hidden), gate, up, ctx.kind, ctx.biased
            )
            d_inner = _rows(d_inner)
        d_weights = _weight_gradient(d_inner, _rows(x), _common(of_inner)).split(ctx.sizes)
        return (d_inner @ w_inner).view_as(x), None, d_down, *d_weights, *d_biases


def _gate_and_up(inner: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor | None]:
    gate, *others = inner.split(sizes, -1)
    return gate, others[0] if others else None


def _common(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the dtype of gradients that one matmul computes: bfloat16, if that of each may be."""
    return torch.float32 if torch.float32 in dtypes else torch.bfloat16


def feed(x: Tensor, kind: str, down: nn.Linear, *inner: nn.Linear) -> Tensor:
    """Return a feed-forward without the bias of its last layer. `can_join` must hold for the inner layers."""
    biases = [layer.bias for layer in inner if layer.bias is not None]
    out: Tensor = _FeedForward.apply(x, kind, down.weight, *(layer.weight for layer in inner), *biases)
    return out
