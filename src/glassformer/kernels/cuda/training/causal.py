"""Causal attention with heads of width 64, for training on a Hopper GPU: cuDNN's forward pass, our backward pass.

With scores s = scale q k^T (masked causally), p = softmax(s), o = p v, and do the gradient of o:

    dv = p^T do,    dp = do v^T,    ds = p (dp - mean),    mean = sum_k p dp = sum o do
    dq = scale ds k,    dk = scale ds^T q

p is computed again from the scores and the kept logsumexp of each query. Matmuls are of bfloat16 with sums in float32;
p and ds are rounded to bfloat16 between them.

`attend` is installed as `Attention.kernel`, in place of `F.scaled_dot_product_attention`. Queries, keys and values are
(B,T,HK), as the projections write them, and may be slices of wider rows. Their gradients are contiguous. Of keys and
values that heads share, the gradients of all heads are written and then added.
"""

import ctypes
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels.replacement import Replacement
from glassformer.kernels.toolchain import nvrtc
from glassformer.kernels.toolchain.operator import operator
from glassformer.model import Model
from glassformer.model.attention import Attention
from glassformer.shapes import Float

TILE, WIDTH, THREADS = 128, 64, 384
STAGING = 4 * WIDTH * 128
SHARED = 6 * 2 * TILE * 128 + STAGING + 4 * 4 * TILE + 128
"""Bytes of shared memory: two stages each of (keys, values), (queries, do) and ds; staging of results; logsumexp and
mean of each query; barriers."""
BUSY = {1024: 0.55, 2048: 0.75}
"""Longest sequence: least share of the GPU's blocks that must have work. From there on it was measured to be at least
13 % faster than cuDNN's backward pass. At 4096 positions it is 4 % faster with 95 % busy, and is not used."""


_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_gradient_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Arguments(ctypes.Structure):
    """The arguments struct of the kernels of causal.cu."""

    _fields_ = [
        *((name, nvrtc.Map) for name in ("query", "key", "value", "d_out", "d_query", "d_key", "d_value")),
        *((name, ctypes.c_void_p) for name in ("results", "d_results", "logs", "bits", "means", "sums")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "sharing", "time", "count", "whole", "parts")),
        ("unused", ctypes.c_uint32 * 13),  # pads the struct to a multiple of 64 bytes
    ]


@cache
def source() -> str:
    return nvrtc.source(Path(__file__).parent, ("floats.cuh", "hopper.cuh", "causal.cu"), {})


@nvrtc.constant
def available() -> bool:
    """Return whether there is a Hopper GPU and NVRTC: the answer is a constant for torch.compile."""
    return nvrtc.can_launch() and torch.cuda.get_device_capability() == (9, 0)


@nvrtc.constant
def blocks() -> int:
    """Return how many thread blocks run at once: each needs most of a multiprocessor."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class Shares(NamedTuple):
    """How the heads of a batch are distributed over thread blocks."""

    whole: int
    """Number of heads that one block computes alone. The heads after these are split."""
    parts: int
    """Parts of each split head; one block computes a part."""
    busy: float
    """Utilisation: the time of a perfect distribution over the time of this one."""


def shares(count: int, time: int, n_blocks: int) -> Shares:
    """Return the fastest distribution, estimated by the largest number of tiles that one block computes.

    Each part of a split head has its own sums of query gradients, which are written and read once more than those of a
    whole head. That is estimated to cost as much as half a tile for each tile of queries.
    """
    tiles, left = time // TILE, count % n_blocks
    of_head = tiles * (tiles + 1) // 2
    parts, last = 1, -(-left // n_blocks) * of_head * 1.0
    for some in range(2, tiles + 1):
        keys = [0] * some
        for j in range(tiles):  # in the order of Tile::move in causal.cu
            keys[min(j % (2 * some), 2 * some - 1 - j % (2 * some))] += tiles - j
        took = -(-left * some // n_blocks) * (max(keys) + tiles / 2)
        if took < last:
            parts, last = some, took
    longest = count // n_blocks * of_head + last
    return Shares(count - left if parts > 1 else count, parts, count * of_head / (n_blocks * longest))


def supports_call(batch: int, time: int, heads: int, width: int, device: torch.device) -> bool:
    """Return whether this kernel computes the gradients of a batch of these sizes, and faster than cuDNN."""
    if device.type != "cuda" or width != WIDTH or time % TILE or time < TILE or not available():
        return False
    least = next((share for most, share in BUSY.items() if time <= most), None)
    return least is not None and shares(batch * heads, time, blocks()).busy >= least


def _by_head(tensors: Iterable[Tensor], width: int) -> list[Tensor]:
    """Return tensors (B,T,HK) as (B,H,T,K)."""
    return [t.unflatten(-1, (-1, width)).transpose(1, 2) for t in tensors]


def _by_token(t: Tensor) -> Tensor:
    """Return a tensor (B,H,T,K) as (B,T,HK)."""
    return t.transpose(1, 2).flatten(2)


def _forward_on_gpu(qkv: list[Tensor], heads: int, scale: float) -> tuple[Tensor, Tensor]:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, logs, *_ = attention(*_by_head(qkv, qkv[0].shape[2] // heads), None, True, 0.0, True, False, scale=scale)
    return _by_token(out), logs.view(out.shape[:3])


@operator(_forward_on_gpu)
def forward(qkv: list[Tensor], heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return o (B,T,HK) and the logsumexp of the scores (B,H,T)."""
    out, logs = _on_cpu(*_by_head(_repeated(qkv, heads), qkv[0].shape[2] // heads), 0.0, True, scale=scale)
    return _by_token(out), logs.contiguous()


def _repeated(qkv: list[Tensor], heads: int) -> list[Tensor]:
    """Return queries, and keys and values as wide as these: each head of them once for every head that reads it."""
    q, *kv = qkv
    sharing, width = q.shape[2] // kv[0].shape[2], q.shape[2] // heads
    if sharing == 1:
        return qkv
    return [q, *(t.unflatten(2, (-1, 1, width)).expand(-1, -1, -1, sharing, -1).flatten(2) for t in kv)]


def _shared(d_qkv: Tensor, qkv: list[Tensor], heads: int) -> list[Tensor]:
    """Return the gradients of queries, keys and values; those of repeated heads are added."""
    d_q, *d_kv = d_qkv.unbind(0)
    sharing, width = d_q.shape[2] // qkv[1].shape[2], d_q.shape[2] // heads
    if sharing == 1:
        return [d_q, *d_kv]
    return [d_q, *(t.unflatten(2, (-1, sharing, width)).sum(3).flatten(2) for t in d_kv)]


def _side_by_side(qkv: list[Tensor], *given: Any) -> list[Tensor]:
    """Return the gradients as parts of one tensor (B,T,C), on a GPU: the matmuls before can read it as a whole."""
    out, heads = given[0], given[3]
    whole = out.new_empty(*out.shape[:2], sum(t.shape[2] for t in qkv))
    parts = list(whole.split([t.shape[2] for t in qkv], 2))
    d_q = parts[0]
    sharing, width = d_q.shape[2] // parts[1].shape[2], d_q.shape[2] // heads
    if sharing == 1:
        _backward_into(parts, qkv, *given)
        return parts
    repeated = out.new_empty(*out.shape[:2], 2, d_q.shape[2])
    _backward_into([d_q, *repeated.unbind(2)], qkv, *given)
    torch.sum(
        repeated.view(*out.shape[:2], -1, sharing, width), 3, out=whole[..., d_q.shape[2] :].unflatten(2, (-1, width))
    )
    return parts


def _rows(t: Tensor) -> Tensor:
    """Return t as the tensor memory accelerator can read it: rows at a constant stride, a multiple of 16 bytes."""
    aligned = t.stride(1) % 8 == 0 and t.data_ptr() % 16 == 0
    return t if aligned and t.stride(2) == 1 and t.stride(0) == t.shape[1] * t.stride(1) else t.contiguous()


def matrices(qkv: list[Tensor], d_out: Tensor, d_qkv: Iterable[Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return the matrices (BT,HK) that the tensor memory accelerator copies, and how many rows at a time."""
    inputs = zip(("query", "key", "value", "d_out"), [*qkv, d_out], strict=True)
    outputs = zip(("d_query", "d_key", "d_value"), d_qkv, strict=True)
    copied = {name: (t.flatten(0, 1), TILE) for name, t in inputs}
    return copied | {name: (t.flatten(0, 1), WIDTH) for name, t in outputs}


def _backward_on_gpu(qkv: list[Tensor], out: Tensor, logs: Tensor, d_out: Tensor, heads: int, scale: float) -> Tensor:
    d_qkv = out.new_empty(3, *out.shape)
    _backward_into(list(d_qkv), qkv, out, logs, d_out, heads, scale)
    return d_qkv


def _backward_into(
    d_qkv: list[Tensor], qkv: list[Tensor], out: Tensor, logs: Tensor, d_out: Tensor, heads: int, scale: float
) -> None:
    """Write the gradients of queries and of repeated keys and values (B,T,HK), which may be parts of wider rows."""
    qkv, out, d_out = [_rows(t) for t in qkv], out.contiguous(), d_out.contiguous()
    B, T, _ = out.shape
    device, count = out.device, B * heads
    whole, parts, _ = shares(count, T, blocks())
    at_once, split = min(whole + (count - whole) * parts, blocks()), count - whole
    bits, means = torch.empty(2, count, T, device=device)
    sums = torch.empty(split * parts + (at_once if whole else 0), T, WIDTH, device=device)
    buffers = {"results": out, "d_results": d_out, "logs": logs, "bits": bits, "means": means, "sums": sums}
    argument = Arguments(
        **{name: nvrtc.tensor_map(*of) for name, of in matrices(qkv, d_out, d_qkv).items()},
        **{name: t.data_ptr() for name, t in buffers.items()},
        scale=scale,
        heads=heads,
        sharing=out.shape[2] // qkv[1].shape[2],
        time=T,
        count=count,
        whole=whole,
        parts=parts,
    )
    index = device.index or 0
    nvrtc.kernel(source(), "find_means", index).launch(argument, -(-count * T // 32), 256)
    nvrtc.kernel(source(), "causal_backward", index, SHARED).launch(argument, at_once, THREADS)
    if split:
        nvrtc.kernel(source(), "finish_queries", index, STAGING).launch(argument, split * (T // TILE), 256)


@operator(_backward_on_gpu)
def backward(qkv: list[Tensor], out: Tensor, logs: Tensor, d_out: Tensor, heads: int, scale: float) -> Tensor:
    """Return the gradients of queries and of repeated keys and values, stacked (3,B,T,HK)."""
    q, k, v, o, do = _by_head((*_repeated(qkv, heads), out, d_out), out.shape[2] // heads)
    return torch.stack([_by_token(t) for t in _gradient_on_cpu(do, q, k, v, o, logs, 0.0, True, scale=scale)])


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: int, scale: float, *qkv: Tensor) -> Tensor:
        out, logs = forward(list(qkv), heads, scale)
        ctx.save_for_backward(out, logs, *qkv)
        ctx.heads, ctx.scale = heads, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out, logs, *qkv = ctx.saved_tensors
        given = (out, logs, gradients[0], ctx.heads, ctx.scale)
        if out.is_cuda and not torch.compiler.is_compiling():
            return None, None, *_side_by_side(qkv, *given)
        return None, None, *_shared(backward(qkv, *given), qkv, ctx.heads)


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "B H T U"]:
    """As `F.scaled_dot_product_attention`, which also computes whatever the kernel does not support."""
    B, H, T, K = q.shape
    plain = is_causal and attn_mask is None and not dropout_p and scale is not None and torch.is_grad_enabled()
    same = q.shape[2:] == k.shape[2:] == v.shape[2:] and q.dtype is k.dtype is v.dtype is torch.bfloat16
    if not (plain and same and supports_call(B, T, H, K, q.device)):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    out: Tensor = _Causal.apply(H, scale, *map(_by_token, (q, k, v)))
    return _by_head([out], K)[0]


def replacements(model: Model) -> Iterator[Replacement]:
    """Yield every attention of a model, with `attend` as its kernel."""
    for module in model.modules():
        if isinstance(module, Attention):
            yield Replacement(module, type(module), {"kernel": attend})
