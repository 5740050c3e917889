"""The chunk kernel of fused_loss.py as one Triton program per row: logits read from memory once, gradient written once.

Only for CUDA. The row (100 KB at 50,000 columns of bf16) stays in the cache between the two passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4
"""Measured at 32,768 rows of 50,304: 2.5 ms, against 3.0 with 8192 and 16 warps; a plain copy takes 1.5."""


@triton.jit
def _row(
    logits,
    gradients,
    targets,
    totals,
    plains,
    columns,
    stride,
    ignored,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    target = tl.load(targets + row)
    counted = target != ignored
    highest = float("-inf")
    exponentials = 0.0
    summed = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(base + at, at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(z, 0))
        exponentials = exponentials * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher), 0)
        summed += tl.sum(tl.where(at < columns, z, 0.0), 0)
        highest = higher
    lse = highest + tl.log(exponentials)
    picked = tl.load(base + tl.where(counted, target, 0)).to(tl.float32)
    plain = tl.where(counted, lse - picked, 0.0)
    flat = tl.where(counted, lse - summed / columns, 0.0)
    total = (1 - smoothing) * plain + smoothing * flat + z_loss * tl.where(counted, lse * lse, 0.0)
    tl.store(totals + row, total)
    tl.store(plains + row, plain)
    weight = 1 + 2 * z_loss * lse
    for start in range(0, stride, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(base + at, at < columns, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(z - lse) * weight - smoothing / columns
        gradient = gradient - tl.where(at == target, 1 - smoothing, 0.0)
        gradient = tl.where(counted & (at < columns), gradient, 0.0)
        tl.store(gradients + row * stride + at, gradient.to(gradients.dtype.element_ty), at < stride)


def chunk_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As fused_loss.chunk_gradients.

    The gradient has a buffer of its own: written over the logits, a compiled caller would copy them first.
    """
    totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    plains, gradients = torch.empty_like(totals), torch.empty_like(logits)
    settings = (columns or logits.shape[1], logits.shape[1], ignored, float(smoothing), float(z_loss))
    _row[(len(logits),)](logits, gradients, targets, totals, plains, *settings, BLOCK, num_warps=WARPS)
    return totals.sum(), plains.sum(), gradients
