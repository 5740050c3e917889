"""The CPU kernels as autograd functions with first derivatives."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glassformer.kernels.cpu.training.library import FeedForward, Heads, Task, load
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


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
