"""Causal attention of heads of 64 numbers, training on a Hopper GPU: cuDNN's, and its gradient here (causal.cu).

With scores s = scale q k^T, what a query may not see left out, p = softmax(s), o = p v, and do given:

    dv = p^T do,    dp = do v^T,    ds = p (dp - mean),    mean = sum_k p dp = sum o do
    dq = scale ds k,    dk = scale ds^T q

p is made again from scores and the logarithms of their sums, which are kept. Products are of bfloat16 with sums in
float32; p and ds are rounded between them.

Queries, keys and values come as one tensor, as one product makes them, or as three. Their gradients leave likewise, so
nobody puts them together.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import hopper
from glassformer.kernels.cuda.training.fused_loss_cuda import with_macros
from glassformer.kernels.toolchain import nvrtc
from glassformer.shapes import Float

TILE, WIDTH, THREADS = 128, 64, 384
BOARD = 4 * WIDTH * 128
SHARED = 6 * 2 * TILE * 128 + BOARD + 4 * 4 * TILE + 128
"""Bytes: two tiles each of keys and values, queries and do, ds; results on their way; numbers of queries; barriers."""
BUSY = {1024: 0.55, 2048: 0.75}
"""Up to so many places, the share of a GPU that is to have work. Down to there it was measured to be faster than the
gradient of cuDNN, by 13 % at least; at 4096 places by 4 % with 95 % busy."""


class Given(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = [
        *((name, nvrtc.Map) for name in ("query", "key", "value", "d_out", "d_query", "d_key", "d_value")),
        *((name, ctypes.c_void_p) for name in ("results", "d_results", "logs", "bits", "means", "sums")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "time", "count", "whole", "parts")),
        ("unused", ctypes.c_uint32 * 14),  # to a multiple of 64 bytes
    ]


@cache
def source() -> str:
    return with_macros({}, "floats.cuh", "hopper.cuh", "causal.cu")


class Shares(NamedTuple):
    """How heads are given to blocks."""

    whole: int
    """So many heads have a block to themselves, one after the other."""
    parts: int
    """Of each of the others, by a block each."""
    busy: float
    """The time that the work would take on all blocks at once, over the time it takes."""


def shares(count: int, time: int, blocks: int) -> Shares:
    """The fastest, by the number of tiles that a block does one after the other.

    A part of a head brings its own sums of the gradients of queries, which are written and read once more than those of
    a whole head. That is taken to cost as much as half as many tiles as there are queries.
    """
    tiles, left = time // TILE, count % blocks
    of_head = tiles * (tiles + 1) // 2
    parts, last = 1, -(-left // blocks) * of_head * 1.0
    for some in range(2, tiles + 1):
        keys = [0] * some
        for j in range(tiles):  # as the kernel deals them
            keys[min(j % (2 * some), 2 * some - 1 - j % (2 * some))] += tiles - j
        took = -(-left * some // blocks) * (max(keys) + tiles / 2)
        if took < last:
            parts, last = some, took
    longest = count // blocks * of_head + last
    return Shares(count - left if parts > 1 else count, parts, count * of_head / (blocks * longest))


def suits(batch: int, time: int, heads: int, width: int, device: torch.device) -> bool:
    """Whether gradients of so many heads are made here."""
    if device.type != "cuda" or width != WIDTH or time % TILE or time < TILE or not hopper.available():
        return False
    least = next((share for most, share in BUSY.items() if time <= most), None)
    return least is not None and shares(batch * heads, time, hopper.blocks()).busy >= least


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _three(given: list[Tensor]) -> list[Tensor]:
    """(B,T,HK) each, of one tensor (B,T,3HK) or of three."""
    return list(given[0].chunk(3, -1)) if len(given) == 1 else given


def _apart(given: list[Tensor], heads: int) -> list[Tensor]:
    """Queries, keys and values (B,T,H,K)."""
    return [t.unflatten(-1, (heads, -1)) for t in _three(given)]


def _patterns(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(p (B,H,T,T), the logarithms of the sums (B,H,T)) in float32 or wider."""
    s = scale * torch.einsum("bthk,bshk->bhts", _wide(q), _wide(k))
    s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return s.softmax(-1), s.logsumexp(-1)


@torch.library.custom_op("glassformer::causal", mutates_args=())
def forward(given: list[Tensor], heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """(o (B,T,HK), logarithms of the sums of exponentials (B,H,T))."""
    q, k, v = _apart(given, heads)
    p, logs = _patterns(q, k, scale)
    return torch.einsum("bhts,bshk->bthk", p, _wide(v)).flatten(2).to(q.dtype), logs


@forward.register_fake
def _(given: list[Tensor], heads: int, scale: float) -> tuple[Tensor, Tensor]:
    B, T, N = given[0].shape
    out = given[0].new_empty(B, T, N // 3 if len(given) == 1 else N)
    return out, given[0].new_empty((B, heads, T), dtype=torch.promote_types(out.dtype, torch.float32))


@forward.register_kernel("cuda")
def _(given: list[Tensor], heads: int, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in _apart(given, heads))
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, logs, *_ = attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return out.transpose(1, 2).flatten(2), logs.view(out.shape[:3])


@torch.library.custom_op("glassformer::causal_gradient", mutates_args=())
def backward(given: list[Tensor], out: Tensor, logs: Tensor, d_out: Tensor, heads: int, scale: float) -> Tensor:
    """Gradients of what was given: (B,T,3HK), or three in one, (3,B,T,HK)."""
    q, k, v = map(_wide, _apart(given, heads))
    o, do = (_wide(t).unflatten(-1, (heads, -1)) for t in (out, d_out))
    p = _patterns(q, k, scale)[0]
    dv = torch.einsum("bhts,bthk->bshk", p, do)
    ds = p * (torch.einsum("bthk,bshk->bhts", do, v) - torch.einsum("bthk,bthk->bht", o, do)[..., None])
    dq, dk = scale * torch.einsum("bhts,bshk->bthk", ds, k), scale * torch.einsum("bhts,bthk->bshk", ds, q)
    d = [t.flatten(2).to(out.dtype) for t in (dq, dk, dv)]
    return torch.cat(d, -1) if len(given) == 1 else torch.stack(d)


@backward.register_fake
def _(given: list[Tensor], out: Tensor, logs: Tensor, d_out: Tensor, heads: int, scale: float) -> Tensor:
    return _room(given)


def _room(given: list[Tensor]) -> Tensor:
    shape = given[0].shape if len(given) == 1 else (3, *given[0].shape)
    return torch.empty(shape, dtype=given[0].dtype, device=given[0].device)


def _rows(t: Tensor) -> Tensor:
    """As the copy engine takes it: rows at one distance, which may be parts of longer ones, in units of 16 bytes."""
    in_units = t.stride(1) % 8 == 0 and t.data_ptr() % 16 == 0
    return t if in_units and t.stride(2) == 1 and t.stride(0) == t.shape[1] * t.stride(1) else t.contiguous()


def matrices(given: list[Tensor], d_out: Tensor, d: Tensor) -> dict[str, tuple[Tensor, int]]:
    """What the copy engine copies: matrices (BT,HK), and the rows it takes at a time."""
    inputs = zip(("query", "key", "value", "d_out"), [*_three(given), d_out], strict=True)
    outputs = zip(("d_query", "d_key", "d_value"), _three([d] if len(given) == 1 else list(d)), strict=True)
    copied = {name: (t.flatten(0, 1), TILE) for name, t in inputs}
    return copied | {name: (t.flatten(0, 1), WIDTH) for name, t in outputs}


@backward.register_kernel("cuda")
def _(given: list[Tensor], out: Tensor, logs: Tensor, d_out: Tensor, heads: int, scale: float) -> Tensor:
    given, out, d_out = [_rows(t) for t in given], out.contiguous(), d_out.contiguous()
    B, T, _ = out.shape
    d, device, count = _room(given), out.device, B * heads
    whole, parts, _ = shares(count, T, hopper.blocks())
    at_once, split = min(whole + (count - whole) * parts, hopper.blocks()), count - whole
    bits, means = torch.empty(2, count, T, device=device)
    sums = torch.empty(split * parts + (at_once if whole else 0), T, WIDTH, device=device)
    places = {"results": out, "d_results": d_out, "logs": logs, "bits": bits, "means": means, "sums": sums}
    argument = Given(
        **{name: nvrtc.tensor_map(*of) for name, of in matrices(given, d_out, d).items()},
        **{name: t.data_ptr() for name, t in places.items()},
        scale=scale,
        heads=heads,
        time=T,
        count=count,
        whole=whole,
        parts=parts,
    )
    index = device.index or 0
    nvrtc.kernel(source(), "find_means", index).launch(argument, -(-count * T // 32), 256)
    nvrtc.kernel(source(), "causal_backward", index, SHARED).launch(argument, at_once, THREADS)
    if split:
        nvrtc.kernel(source(), "finish_queries", index, BOARD).launch(argument, split * (T // TILE), 256)
    return d


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: int, scale: float, *given: Tensor) -> Tensor:
        out, logs = forward(list(given), heads, scale)
        ctx.save_for_backward(out, logs, *given)
        ctx.heads, ctx.scale = heads, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out, logs, *given = ctx.saved_tensors
        d = backward(given, out, logs, gradients[0], ctx.heads, ctx.scale)
        return (None, None, d) if len(given) == 1 else (None, None, *d.unbind(0))


def attend(given: list[Tensor], heads: int, scale: float) -> Float[Tensor, "B T N"]:
    """Results of all heads side by side, from queries, keys and values (B,T,3N) in one tensor or (B,T,N) in three."""
    out: Tensor = _Causal.apply(heads, scale, *given)
    return out
