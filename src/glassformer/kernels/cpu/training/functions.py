"""The CPU kernels as autograd functions with first derivatives."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glassformer.kernels.cpu.training.library import MOST_LAYERS, FeedForward, Heads, Layers, Task, load
from glassformer.shapes import Float

WIDE = 16
"""Every width must be a multiple of this, the number of floats that the kernels process at a time."""


def attention(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B G S K"], v: Float[Tensor, "B G S U"], scale: float, causal: bool
) -> Float[Tensor, "B H T U"]:
    """Return softmax(scale q k^T) v of float32 or bfloat16, summed in float32; `causal` for as many queries as keys."""
    out: Tensor = _Attention.apply(*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), scale, causal)
    return out


def feed_forward(
    x: Float[Tensor, "*n D"],
    up: Float[Tensor, "F D"],
    up_bias: Float[Tensor, "F"] | None,
    down: Float[Tensor, "D F"],
    down_bias: Float[Tensor, "D"] | None,
    tanh: bool,
) -> Float[Tensor, "*n D"]:
    """Return down(gelu(up(x))) in float32, with the exact GELU or its tanh form."""
    out: Tensor = _FeedForward.apply(x, up, up_bias, down, down_bias, tanh)
    return out


def linear(
    x: Float[Tensor, "*n D"], weights: Sequence[Float[Tensor, "_ D"]], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Return x W^T + b of up to three layers in float32."""
    out: tuple[Tensor, ...] = _Linear.apply(x, *weights, *biases)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        B, H, T, _ = q.shape
        out = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
        lse = torch.empty(B, H, T)
        load().glass_attention(_task((q, k, v, out), lse, scale, causal), 0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        # memory order (batch, time, head, width), which the projections read
        grads = [x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v)]
        load().glass_attention(_task((q, k, v, out, d_out, *grads), lse, *ctx.settings), 1)
        return (*grads, None, None)


def _task(tensors: tuple[Tensor, ...], lse: Tensor, scale: float, causal: bool) -> Task:
    q, k, v = tensors[:3]
    B, H, T, K = q.shape
    views = [Heads(x.data_ptr(), *x.stride()[:3]) for x in tensors]
    views += [Heads()] * (8 - len(views))
    sizes = (B, H, k.shape[1], T, k.shape[2], K, v.shape[-1])
    return Task(*views, lse.data_ptr(), *sizes, scale, causal, q.dtype is torch.bfloat16)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, tanh: bool
    ) -> Tensor:
        x = x.contiguous()
        n, out = x.numel() // x.shape[-1], torch.empty_like(x)
        pre = x.new_empty(n, len(up))
        given = (x, up, down, up_bias, down_bias, pre, out)
        load().glass_feed(FeedForward(*map(_at, given), None, None, None, None, None, n, *up.shape[::-1], tanh), 0)
        ctx.save_for_backward(x, up, down, pre)
        ctx.biased, ctx.tanh = (up_bias is not None, down_bias is not None), tanh
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, pre = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_x, d_up, d_down = torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)
        d_up_bias = up.new_empty(len(up)) if ctx.biased[0] else None
        given = (x, up, down, None, None, pre, None, d_out, d_x, d_up, d_down, d_up_bias)
        load().glass_feed(FeedForward(*map(_at, given), len(pre), *up.shape[::-1], ctx.tanh), 1)
        d_down_bias = d_out.flatten(0, -2).sum(0) if ctx.biased[1] else None
        return d_x, d_up, d_up_bias, d_down, d_down_bias, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        x, weights, biases = x.contiguous(), given[: len(given) // 2], given[len(given) // 2 :]
        matrices = [w.contiguous() for w in weights if w is not None]
        out = [x.new_empty(*x.shape[:-1], len(w)) for w in matrices]
        _run_layers(0, x, weight=matrices, bias=biases, out=out)
        ctx.save_for_backward(x, *matrices)
        ctx.biased = [b is not None for b in biases]
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        dys = [g.contiguous() for g in gradients]
        d_x, d_weights = torch.empty_like(x), [torch.empty_like(w) for w in matrices]
        _run_layers(1, x, weight=matrices, gradient=dys, d_weight=d_weights, d_x=d_x)
        sums = (dy.flatten(0, -2).sum(0) if biased else None for dy, biased in zip(dys, ctx.biased, strict=True))
        return d_x, *d_weights, *sums


def _run_layers(
    backward: int, x: Tensor, weight: list[Tensor], d_x: Tensor | None = None, **lists: Sequence[Tensor | None]
) -> None:
    given = Layers(x=x.data_ptr(), d_x=_at(d_x), n=x.numel() // x.shape[-1], width=x.shape[-1], count=len(weight))
    given.size = (ctypes.c_int64 * MOST_LAYERS)(*map(len, weight))
    for name, tensors in {"weight": weight, **lists}.items():
        setattr(given, name, (ctypes.c_void_p * MOST_LAYERS)(*map(_at, tensors)))
    load().glass_linear(given, backward)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
