"""Cross-entropy of a linear head that never holds all logits at once.

With a vocabulary of 50,000 tokens, the logits of a batch are by far the largest tensor of training. Here the rows are
processed in chunks: logits of a chunk, its loss, and immediately its gradients, which are all that is kept. The values
are those of `F.cross_entropy(h W^T + b)`, which tests/training/test_chunked_loss.py compares.

Per row with logits z, p = softmax(z), V classes, target y, smoothing e and z-loss weight w:

    loss   = (1 - e) (lse - z_y) + e (lse - mean(z)) + w lse^2,     lse = logsumexp(z)
    d/dz_k = p_k (1 + 2 w lse) - (1 - e) [k = y] - e / V

Tensor cores and the kernels need rows of a multiple of 16 bytes. Where V gives none (GPT-2's is 50,257), the copy of
the weight that the matmuls read is padded with rows of zeros; the additional columns of logits are ignored.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.model.adapters import Matmul, matmul
from glassformer.sizing.step import CHUNK_BYTES, PLAIN_LOGIT
from glassformer.training import accelerate

HeadGradients = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]


def row_statistics(z: Tensor, targets: Tensor, ignored: int, smoothing: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lse, the target's logit, the mean logit (for smoothing) and the target's column, of each row of logits."""
    column = torch.where(targets != ignored, targets, 0)
    lse = z.logsumexp(-1)
    return lse, z.gather(1, column[:, None])[:, 0], z.mean(-1) if smoothing else torch.zeros_like(lse), column


def chunk_gradients(
    logits: Tensor,
    targets: Tensor,
    ignored: int,
    smoothing: float,
    z_loss: float,
    columns: int | None = None,
    statistics: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = row_statistics,
    classes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, plain cross-entropy, gradient of the total with respect to the logits, in their dtype).

    Only the first `columns` are logits; the gradient of the rest is 0. Ranks that divide the vocabulary give the
    number of all classes, and `statistics` over all of them.
    """
    z = logits[:, :columns].float()
    counted = targets != ignored
    lse, picked, mean, column = statistics(z, targets, ignored, smoothing)
    plain = torch.where(counted, lse - picked, 0.0)
    total = plain
    weight = torch.ones_like(lse)
    if smoothing:
        total = (1 - smoothing) * plain + smoothing * torch.where(counted, lse - mean, 0.0)
    if z_loss:
        total = total + z_loss * torch.where(counted, lse.square(), 0.0)
        weight = weight + 2 * z_loss * lse
    gradient = (z - lse[:, None]).exp() * weight[:, None] - smoothing / (classes or z.shape[-1])
    is_target = torch.arange(z.shape[-1], device=z.device)[None, :] == column[:, None]
    gradient = torch.where(counted[:, None], gradient - (1 - smoothing) * is_target, 0.0)
    if z.shape != logits.shape:
        gradient = F.pad(gradient, (0, logits.shape[1] - z.shape[1]))
    return total.sum(), plain.sum(), gradient.to(logits.dtype)


def chunk_gradients_in_place(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `chunk_gradients` does, on a CPU. The gradient is written over the logits.

    A few rows at a time go through all passes while they are in the cache, so that memory is read and written once.
    (Such writes cannot be compiled: see `_LinearCrossEntropy`.)
    """
    rows = max(1, CACHED_LOGITS // logits.shape[1])
    settings = ignored, smoothing, z_loss, columns
    parts = zip(logits.split(rows), targets.split(rows), strict=True)
    losses = [_write_gradient(part, wanted, *settings) for part, wanted in parts]
    total, plain = (torch.stack(column).sum() for column in zip(*losses, strict=True))
    return total, plain, logits


CACHED_LOGITS = 2**20
"""Logits that go through all passes of the loss together: 4 MiB in float32, which the caches of two cores hold."""


def _write_gradient(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int | None
) -> tuple[Tensor, Tensor]:
    """Write the gradient over these rows of logits; return (total, plain cross-entropy)."""
    z = logits[:, :columns]
    exact = torch.promote_types(z.dtype, torch.float32)
    counted = targets != ignored
    safe = torch.where(counted, targets, 0)[:, None]
    p = z.softmax(-1, dtype=exact)
    # exp is what takes time, so it is computed once: p is exp(z - largest) / sum, hence log(sum) = -log(largest p)
    largest, log_sum = z.amax(-1).to(exact), -p.amax(-1).log()
    plain = torch.where(counted, largest - z.gather(1, safe)[:, 0].to(exact) + log_sum, 0.0)
    total = plain
    if smoothing:
        mean = z.mean(-1, dtype=exact)
        total = (1 - smoothing) * plain + smoothing * torch.where(counted, largest - mean + log_sum, 0.0)
    if z_loss:
        lse = largest + log_sum
        total = total + z_loss * torch.where(counted, lse.square(), 0.0)
        p *= (1 + 2 * z_loss * lse)[:, None]
    if smoothing:
        p -= smoothing / z.shape[-1]
    p.scatter_add_(1, safe, torch.full_like(plain, smoothing - 1)[:, None])
    if not bool(counted.all()):
        p[~counted] = 0.0
    z.copy_(p)
    if z.shape != logits.shape:
        logits[:, columns:] = 0.0
    return total.sum(), plain.sum()


def gradients_of(logits: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the function that computes the loss of these logits and its gradient."""
    eager = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    return chunk_gradients_in_place if eager and logits.dtype in (torch.float32, torch.bfloat16) else chunk_gradients


def head_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: tuple[int, float, float],
    columns: int,
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return (total, plain, gradients of hidden, weight and bias) of one chunk, by plain torch.

    `settings`: ignored target id, label smoothing, weight of the z-loss. Kernels implement the same signature.
    `gradients` computes those of the logits in place of `chunk_gradients`.
    """
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    total, plain, gradient = (gradients or gradients_of(logits))(logits, targets, *settings, columns)
    d_bias = None if bias is None else gradient.sum(0, dtype=torch.float32)
    return total, plain, gradient @ weight, gradient.T @ hidden, d_bias


def frozen_head_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: tuple[int, float, float],
    columns: int,
    multiply: Matmul = matmul,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return what `head_gradients` does for a weight and a bias that are frozen: their gradients are 0."""
    logits = multiply(hidden, weight, bias)
    total, plain, gradient = gradients_of(logits)(logits, targets, *settings, columns)
    nothing = hidden.new_zeros(())
    return total, plain, multiply(gradient, weight.t(), None), nothing, None if bias is None else nothing


def row_multiple(device: str, dtype: torch.dtype, float8: bool) -> int:
    """Return what the number of logits of a row is a multiple of. On a CPU it may be any number."""
    return 16 if float8 else 8 if dtype is torch.bfloat16 and device != "cpu" else 1


def padded_rows(columns: int, multiple: int) -> int:
    """Return the number of logits of a row: `columns`, or the next multiple of 64 unless it is a `multiple`."""
    return columns if columns % multiple == 0 else -(-columns // 64) * 64


def pad(x: Tensor, rows: int) -> Tensor:
    """Pad x with rows (or entries) of zeros to `rows` in all."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x))) if len(x) < rows else x


def chunk_rows(stride: int, alive: int = 4) -> int:
    """Return the rows of a chunk, for rows of `stride` logits, of each of which `alive` bytes are alive at once.

    It is a power of two, so that usual batches divide evenly. A chunk fills a GPU and is small compared with the
    activations.
    """
    return 2 ** int(math.log2(max(1, CHUNK_BYTES // (alive * stride))))


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
        multiple: int,
        prepare: Callable[[Tensor, int], Any] | None,
        gradients: HeadGradients,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        h, columns = hidden.to(dtype), len(weight)
        stride = padded_rows(columns, multiple)
        w = pad(weight.to(dtype), stride) if prepare is None else prepare(weight, stride)
        b = None if bias is None else pad(bias.to(dtype), stride)
        total = torch.zeros((), device=h.device)
        plain = torch.zeros((), device=h.device)
        # inside a compiled autograd function, nothing saved for the backward pass is written in place: torch 2.11 loses
        # such writes, and every gradient is zero (src/glassformer/bench/gpu/cuda_check.py compares them)
        in_place = not torch.compiler.is_compiling()
        d_hidden: list[Tensor] = []
        d_weight: Tensor | float = 0.0
        d_bias: Tensor | float = 0.0
        for first in range(0, len(h), rows):
            part, wanted = h[first : first + rows], targets[first : first + rows]
            chunk_total, chunk_plain, d_part, d_chunk, d_chunk_bias = gradients(part, w, b, wanted, settings, columns)
            total = total + chunk_total
            plain = plain + chunk_plain
            d_hidden.append(d_part)
            if in_place:  # the gradient of a large vocabulary has gigabytes: no copies of it
                d_weight = d_weight.add_(d_chunk) if isinstance(d_weight, Tensor) else d_chunk.float()
            else:
                d_weight = d_weight + d_chunk.float()
            if d_chunk_bias is not None:
                d_bias = d_bias + d_chunk_bias
        ctx.save_for_backward(torch.cat(d_hidden), d_weight, d_bias if b is not None else None)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.columns, ctx.weight = columns, weight
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scale, (h_dtype, w_dtype, b_dtype) = gradients[0], ctx.dtypes
        hidden, weight = (d_hidden * scale).to(h_dtype), None
        if ctx.needs_input_grad[1]:
            if d_weight.is_cuda and not torch.compiler.is_compiling():
                torch._foreach_mul_([d_weight], scale)  # in place: it may have gigabytes
            else:
                d_weight = d_weight * scale
            weight = accelerate.leave_to_embedding(ctx.weight, d_weight[: ctx.columns].to(w_dtype))
        wants_bias = d_bias is not None and ctx.needs_input_grad[2]
        bias = (d_bias[: ctx.columns] * scale).to(b_dtype) if wants_bias else None
        return hidden, weight, bias, None, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignored: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    float8: bool = False,
    gradients: HeadGradients | None = None,
) -> tuple[Tensor, Tensor]:
    """(total, plain cross-entropy), summed, of hidden (N,D) through weight (V,D); only `total` has a gradient.

    Under autocast, matmuls use its dtype; sums, losses and the weight's gradient are float32. With `float8` (which does
    not support a bias) the matmuls are in float8, and the losses are those of the resulting logits. `gradients`
    computes a chunk in place of `head_gradients`.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if float8:
        assert bias is None
        dtype = torch.bfloat16
    multiple = row_multiple(device, dtype, float8)
    kernel = accelerate.head_kernel(hidden.device, dtype, float8) if gradients is None else None
    is_plain = kernel is None and not (device == "cpu" and dtype is torch.float32 and gradients is None)
    alive = PLAIN_LOGIT if is_plain and not torch.compiler.is_compiling() else 4
    rows = chunk_rows(padded_rows(len(weight), multiple), alive)
    if kernel is None and gradients is None:
        gradients = head_gradients
        if not weight.requires_grad and (bias is None or not bias.requires_grad):
            gradients = frozen_head_gradients
            if device == "cpu" and (found := accelerate.frozen_head(weight, dtype)) is not None:
                kernel = found.prepare, functools.partial(frozen_head_gradients, multiply=found.multiply)
                rows = min(rows, found.rows)
    prepare, gradients = (None, gradients) if kernel is None else kernel
    with torch.autocast(device, enabled=False):
        out: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
            *(hidden, weight, bias, targets, (ignored, label_smoothing, z_loss)),
            *(dtype, multiple, prepare, gradients, rows),
        )
    return out


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, ignored: int = -100
) -> Tensor:
    """Return the summed cross-entropy of hidden (N,D) through weight (V,D), chunk by chunk, without gradients."""
    total, rows = torch.zeros((), device=hidden.device), chunk_rows(len(weight))
    for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = F.linear(part, weight, bias).float()
        total = total + F.cross_entropy(logits, wanted, ignore_index=ignored, reduction="sum")
    return total
