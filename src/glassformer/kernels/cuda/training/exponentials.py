"""Cross-entropy's gradient from exponentials that the product of the head makes, on Hopper GPUs (exponentials.cu).

With z the logits of a row and y its target, the product gives e_k = exp(z_k - z_y) instead of z_k, and sums of rows:

    S = sum_k e_k,    loss = lse - z_y = log S,    p_k = e_k / S
    d/dz_k = p_k f - [k = y] = (f / S) (e_k - [k = y] S / f),    f = 1 + 2 w lse with z-loss of weight w

So one number of each row is mended, and the rest of a softmax's gradient is a factor of its row, its `share` f / S. It
is given to what is small: to the row of the gradient of hidden states, and to the hidden states that the gradient of
the weight is made of. Logits are neither written nor read, nor is a softmax.

Where some z_k - z_y is so large that there is no such number, exponentials of that row are taken from its highest z.
"""

import ctypes

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import hopper, tiles
from glassformer.kernels.cuda.training.products import multiply
from glassformer.kernels.toolchain import nvrtc

FAR = 1e30
LEAST_COLUMNS = 2048
"""Fewer leave blocks of a GPU without work; then the loss is small beside the rest, too."""


class Given(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = [
        *((name, nvrtc.Map) for name in ("left", "right", "out")),
        *((name, ctypes.c_void_p) for name in ("hiddens", "weights", "exponentials", "targets", "offsets", "sums")),
        *((name, ctypes.c_void_p) for name in ("totals", "plains", "shares")),
        ("ignored", ctypes.c_int64),
        ("z_loss", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "stride", "columns")),
        ("unused", ctypes.c_uint64 * 4),  # to a multiple of 64 bytes
    ]


def suits(hidden: Tensor, weight: Tensor, smoothing: float) -> bool:
    """Whether the gradient of these is made here: a smoothed one is not p_k f beside the target."""
    narrow = hidden.dtype is weight.dtype is torch.bfloat16 and hidden.is_cuda
    fits = hidden.shape[1] % 8 == 0 and len(weight) >= LEAST_COLUMNS
    return hopper.available() and narrow and smoothing == 0 and fits


def arguments(
    hidden: Tensor, weight: Tensor, targets: Tensor, out: Tensor, numbers: Tensor, sums: Tensor
) -> dict[str, object]:
    """Where things are. `numbers`: (4, N), of each row its offset, total, plain loss and share."""
    matrices = {"hiddens": hidden, "weights": weight, "exponentials": out, "targets": targets, "sums": sums}
    rows = dict(zip(("offsets", "totals", "plains", "shares"), numbers, strict=True))
    return {name: t.data_ptr() for name, t in (matrices | rows).items()} | {"rows": len(out), "stride": out.shape[1]}


@torch.library.custom_op("glassformer::exponentials", mutates_args=())
def exponentials(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    """(e (N,V), (totals, plain losses, shares) (3,N)) of hidden (N,D) through the first `columns` rows of weight (V,D).

    The gradient of the logits is share e.
    """
    z = hidden.float() @ weight.float().T
    z[:, columns:] = float("-inf")
    counted = targets != ignored
    target = torch.where(counted, targets, 0)[:, None]
    offset, highest = z.gather(1, target)[:, 0], z.amax(1)
    top = torch.where((z - offset[:, None]).exp().sum(1) >= FAR, highest, offset)
    e = (z - top[:, None]).exp()
    total = e.sum(1)
    lse, plain = total.log() + top, total.log() + (top - offset)
    factor = 1 + 2 * z_loss * lse
    e = e.scatter_add(1, target, -(total / factor)[:, None])
    numbers = torch.stack([plain + z_loss * lse.square(), plain, factor / total])
    return torch.where(counted[:, None], e, 0.0).to(hidden.dtype), torch.where(counted, numbers, 0.0)


@exponentials.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(len(hidden), len(weight)), hidden.new_empty((3, len(hidden)), dtype=torch.float32)


@exponentials.register_kernel("cuda")
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    N, V, device = len(hidden), len(weight), hidden.device
    out = torch.empty(N, V, dtype=hidden.dtype, device=device)
    numbers, sums = torch.empty(4, N, device=device), torch.empty(-(-V // tiles.TILE), N, device=device)
    maps = tiles.factors(hidden, weight) | {"out": (out, 64)}
    given = Given(
        **{name: nvrtc.tensor_map(*of) for name, of in maps.items()},
        **arguments(hidden, weight, targets, out, numbers, sums),
        ignored=ignored,
        z_loss=z_loss,
        columns=columns,
    )
    text, index = tiles.source("exponentials.cu", hidden.shape[1]), device.index or 0
    nvrtc.kernel(text, "find_offsets", index).launch(given, -(-N // 8), 256)
    tiles.launch(text, "exponentials", given, index, boards=1)
    nvrtc.kernel(text, "find_losses", index).launch(given, -(-N // 32), 256)
    return out, numbers[1:]


def head_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(total, plain cross-entropy, gradient of the total with respect to hidden, to weight) of a chunk."""
    e, (totals, plains, shares) = exponentials(hidden, weight, targets, ignored, z_loss, columns)
    d_hidden = (multiply(e, weight) * shares[:, None]).to(hidden.dtype)
    d_weight = multiply(e, (hidden * shares[:, None]).to(hidden.dtype), left_turned=True)
    return totals.sum(), plains.sum(), d_hidden, d_weight
