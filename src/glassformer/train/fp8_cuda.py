"""The kernels of fp8.py in CUDA C++ (fp8.cu): what is cast is read once, and written as it stands and transposed.

Only for CUDA. Tests compile them for the CPU and compare them with the definitions in fp8.py.
"""

import ctypes

import torch
from torch import Tensor

from glassformer import nvrtc
from glassformer.train import fused_loss_cuda

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS_TIMES = 2**14
"""What the loss's gradients are multiplied by: the inverse of fp8.GRADIENT_UNIT."""
KINDS = ("relu", "relu2", "silu", "gelu_tanh", "gelu", "tanh")
THREADS, DOWN, ACROSS, RUN = 256, 128, 64, 4
"""As in fp8.cu: a block's threads, a tile's rows and columns, and the eights of a thread where nothing is turned."""
MULTIPLE = 16
MOST, PARTS = 4, 528
"""Of squares.cu: tensors of a launch, and blocks of a tensor (four a multiprocessor of an H200)."""
POINTERS = ("x", "pre", "unit", "post_unit", "out", "turned", "post_turned", "sums")


class Given(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
    ]


class Several(ctypes.Structure):
    """The argument of squares.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * MOST),
        ("numbers", ctypes.c_int64 * MOST),
        ("wide", ctypes.c_int32 * MOST),
        ("parts", ctypes.c_void_p),
    ]


def source(**macros: int) -> str:
    """`macros`: those of fp8.cu that are not 0."""
    chosen = {"WIDE": 0, "SHORT": 0, "KIND": 0, "SUMMED": 0, **macros}
    return fused_loss_cuda.with_macros(chosen, "eight.cuh", "fp8.cu")


def launch(name: str, shape: torch.Size, blocks: int, macros: dict[str, int], **tensors: Tensor) -> None:
    """Run a kernel on matrices of this shape, by the names that `Given` has for them."""
    some = next(iter(tensors.values()))
    given = Given(rows=shape[0], columns=shape[1], **{key: t.data_ptr() for key, t in tensors.items()})
    nvrtc.kernel(source(**macros), name, some.device.index or 0).launch(given, blocks, THREADS)


def tiles(shape: torch.Size, across: int = ACROSS) -> int:
    """How many blocks take a matrix."""
    assert all(n % MULTIPLE == 0 for n in shape), shape
    return -(-shape[0] // DOWN) * -(-shape[1] // across)


def _both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape[::-1], dtype=dtype, device=x.device)


def cast(x: Tensor, unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As fp8.cast."""
    x = x.contiguous()
    out, turned = _both(x, dtype)
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    macros = {"WIDE": int(x.dtype is torch.float32), "SHORT": int(dtype is E5M2)}
    launch("cast", x.shape, tiles(x.shape), macros, x=x, unit=unit, out=out, turned=turned)
    return out, turned


def activate(pre: Tensor, unit: Tensor, kind: str) -> Tensor:
    """As fp8.activate."""
    pre = pre.contiguous()
    assert pre.dtype is torch.bfloat16
    assert pre.numel() % 8 == 0
    out = torch.empty(pre.shape, dtype=E4M3, device=pre.device)
    blocks = -(-pre.numel() // (8 * RUN * THREADS))
    launch("activate", pre.shape, blocks, {"KIND": KINDS.index(kind)}, pre=pre, unit=unit, out=out)
    return out


def activate_backward(
    d_post: Tensor, pre: Tensor, unit: Tensor, post_unit: Tensor, kind: str, summed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fp8.activate_backward. Sums are of tiles first, then of those: the same in every run."""
    d_post, pre = d_post.contiguous(), pre.contiguous()
    assert d_post.dtype is pre.dtype is torch.bfloat16
    out, turned = _both(pre, E5M2)
    post_turned = torch.empty(pre.shape[::-1], dtype=E4M3, device=pre.device)
    sums = torch.empty(-(-len(pre) // DOWN) if summed else 0, pre.shape[1], device=pre.device)
    macros = {"KIND": KINDS.index(kind), "SUMMED": int(summed)}
    launch(
        "activate_backward", pre.shape, tiles(pre.shape), macros,
        x=d_post, pre=pre, unit=unit, post_unit=post_unit,
        out=out, turned=turned, post_turned=post_turned, sums=sums,
    )  # fmt: skip
    return out, turned, post_turned, sums.sum(0) if summed else sums.new_empty(0)


def mean_squares(tensors: list[Tensor]) -> Tensor:
    """As fp8.mean_squares."""
    tensors = [t.contiguous() for t in tensors]
    assert all(t.dtype in (torch.bfloat16, torch.float32) and t.numel() % MULTIPLE == 0 for t in tensors)
    parts = torch.empty(len(tensors), PARTS, device=tensors[0].device)
    text = fused_loss_cuda.with_macros({"MOST": MOST, "PARTS": PARTS}, "squares.cu")
    given = Several(
        (ctypes.c_void_p * MOST)(*(t.data_ptr() for t in tensors)),
        (ctypes.c_int64 * MOST)(*(t.numel() for t in tensors)),
        (ctypes.c_int32 * MOST)(*(int(t.dtype is torch.float32) for t in tensors)),
        parts.data_ptr(),
    )
    nvrtc.kernel(text, "squares", parts.device.index or 0).launch(given, len(tensors) * PARTS, THREADS)
    return parts.sum(1)


def turn(x: Tensor) -> Tensor:
    """The transpose of a matrix of 8 bits in memory of its own."""
    x = x.contiguous()
    turned = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    launch("turn", x.shape, tiles(x.shape, 2 * ACROSS), {}, x=x, turned=turned)
    return turned


def loss_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fp8.loss_gradients. Rows that the kernel does not take go through bfloat16."""
    if not fused_loss_cuda.fits(logits):
        from glassformer.train.fused_loss import KERNELS, chunk_gradients  # it is built on this module

        kernel = KERNELS.get("cuda", chunk_gradients)
        total, plain, gradient = kernel(logits, targets, ignored, smoothing, z_loss)
        unit = torch.full((), 1 / GRADIENTS_TIMES, device=logits.device)
        return total, plain, *cast(gradient, unit, E5M2)
    gradients = torch.empty(logits.shape, dtype=E5M2, device=logits.device)
    rows = fused_loss_cuda.write_gradients(
        logits, gradients, targets, ignored, smoothing, z_loss, eight=GRADIENTS_TIMES
    )
    return rows[0].sum(), rows[1].sum(), gradients, turn(gradients)
