"""Cross-entropy of a linear head without ever holding all logits.

With 50,000 tokens of vocabulary the logits of a batch are the largest tensor of training by far. Here rows are taken in
chunks: logits of a chunk, its loss, and at once its gradients, which is all that is kept (on some GPUs there are not
even these logits: exponentials.py). The values are those of `F.cross_entropy(h W^T + b)`, pinned by
tests/kernels/cuda/training/test_fused_loss.py.

Per row with logits z, p = softmax(z), V classes, target y, smoothing e and z-loss weight w:

    loss   = (1 - e) (lse - z_y) + e (lse - mean(z)) + w lse^2,     lse = logsumexp(z)
    d/dz_k = p_k (1 + 2 w lse) - (1 - e) [k = y] - e / V

Tensor cores and the kernels want rows of a multiple of 16 bytes. Where V gives none (GPT-2's is 50,257), the copy of
the weight that products read gets rows of zeros, up to `width`; the columns of logits they make count for nothing.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import exponentials, fp8
from glassformer.kernels.cuda.training.products import multiply

CHUNK_BYTES = 2**32
"""A chunk's logits in float32 take at most this: large enough to fill a GPU, small beside the activations."""


def chunk_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(total, plain cross-entropy, gradient of the total with respect to the logits, in their dtype) of a chunk.

    Only the first `columns` are logits; the gradient of the rest is 0.
    """
    z = logits[:, :columns].float()
    counted = targets != ignored
    safe = torch.where(counted, targets, 0)
    lse = z.logsumexp(-1)
    picked = z.gather(1, safe[:, None])[:, 0]
    plain = torch.where(counted, lse - picked, 0.0)
    total = plain
    weight = torch.ones_like(lse)
    if smoothing:
        total = (1 - smoothing) * plain + smoothing * torch.where(counted, lse - z.mean(-1), 0.0)
    if z_loss:
        total = total + z_loss * torch.where(counted, lse.square(), 0.0)
        weight = weight + 2 * z_loss * lse
    gradient = (z - lse[:, None]).exp() * weight[:, None] - smoothing / z.shape[-1]
    places = torch.arange(z.shape[-1], device=z.device)
    gradient = gradient - (1 - smoothing) * (places[None, :] == safe[:, None])
    gradient = torch.where(counted[:, None], gradient, 0.0)
    if z.shape != logits.shape:
        gradient = torch.nn.functional.pad(gradient, (0, logits.shape[1] - z.shape[1]))
    return total.sum(), plain.sum(), gradient.to(logits.dtype)


def width(columns: int, dtype: torch.dtype, float8: bool) -> int:
    """How long rows of logits are: `columns`, or if these do not fill 16 bytes, the next multiple of 64."""
    multiple = fp8.MULTIPLE if float8 else 8 if dtype is torch.bfloat16 else 1
    return columns if columns % multiple == 0 else -(-columns // 64) * 64


def fastest() -> dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """Faster `chunk_gradients` by type of device: CUDA C++, or Triton's where there is no compiler for that."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return {}
    from glassformer.kernels.cuda.training import fused_loss_cuda, fused_loss_triton

    return {"cuda": (fused_loss_cuda if fused_loss_cuda.can_compile() else fused_loss_triton).chunk_gradients}


KERNELS = fastest()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: tuple[int, float, float],
        dtype: torch.dtype,
        kernel: Callable[..., tuple[Tensor, Tensor, Tensor]],
        float8: bool,
    ) -> tuple[Tensor, Tensor]:
        h, columns = hidden.to(dtype), len(weight)
        stride = width(columns, dtype, float8)
        w, b = (None if t is None or float8 else _filled(t.to(dtype), stride) for t in (weight, bias))
        rows = 2 ** int(math.log2(max(1, CHUNK_BYTES // (4 * stride))))  # a power of two: even chunks of a usual batch
        total = torch.zeros((), device=h.device)
        plain = torch.zeros((), device=h.device)
        # nothing saved for the backward pass is ever written in place: inside a compiled autograd function torch 2.11
        # loses such writes, and every gradient is zero (src/glassformer/bench/gpu/cuda_check.py compares them)
        d_hidden: list[Tensor] = []
        d_weight: Tensor | float = 0.0
        d_bias: Tensor | float = 0.0
        w8 = fp8.cast_measured(weight, stride) if float8 else None
        for first in range(0, len(h), rows):
            part, asked = h[first : first + rows], targets[first : first + rows]
            if w8 is not None:
                chunk_total, chunk_plain, d_part, d_chunk = fp8.head_gradients(part, w8, asked, *settings, columns)
            elif w is not None and b is None and exponentials.suits(part, w, settings[1]):
                chunk_total, chunk_plain, d_part, d_chunk = exponentials.head_gradients(
                    part, w, asked, settings[0], settings[2], columns
                )
            else:
                assert w is not None
                logits = multiply(part, w, right_turned=True, bias=b)
                chunk_total, chunk_plain, gradient = kernel(logits, asked, *settings, columns)
                d_part, d_chunk = multiply(gradient, w), multiply(gradient, part, left_turned=True)
                if b is not None:
                    d_bias = d_bias + gradient.sum(0, dtype=torch.float32)
            total = total + chunk_total
            plain = plain + chunk_plain
            d_hidden.append(d_part)
            d_weight = d_weight + d_chunk.float()
        ctx.save_for_backward(torch.cat(d_hidden), d_weight, d_bias if b is not None else None)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.columns = columns
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        d_weight, d_bias = d_weight[: ctx.columns], None if d_bias is None else d_bias[: ctx.columns]
        scale, (h_dtype, w_dtype, b_dtype) = gradients[0], ctx.dtypes
        bias = None if d_bias is None else (d_bias * scale).to(b_dtype)
        return (d_hidden * scale).to(h_dtype), (d_weight * scale).to(w_dtype), bias, None, None, None, None, None


def _filled(x: Tensor, rows: int) -> Tensor:
    """With rows (or entries) of zeros below, `rows` in all."""
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x))) if len(x) < rows else x


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignored: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    float8: bool = False,
) -> tuple[Tensor, Tensor]:
    """(total, plain cross-entropy), summed, of hidden (N,D) through weight (V,D); only `total` has a gradient.

    Under autocast products are taken in its dtype; sums, losses and the weight's gradient in float32. With `float8`
    (no bias then) products are taken in 8 bits, as kernels/cuda/training/fp8.py says, and the losses are those of these logits.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    settings = (ignored, label_smoothing, z_loss)
    if float8:
        assert bias is None
        hidden, targets, dtype = fp8.fill_rows(hidden), fp8.fill_rows(targets, ignored), torch.bfloat16
    with torch.autocast(device, enabled=False):
        out: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
            hidden, weight, bias, targets, settings, dtype, KERNELS.get(device, chunk_gradients), float8
        )
    return out
