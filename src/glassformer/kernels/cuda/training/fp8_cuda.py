"""The kernels of fp8.py in CUDA C++ (fp8.cu): what is cast is read once, and written as it stands and transposed.

Only for CUDA. Tests compile them for the CPU and compare them with the definitions in fp8.py.
"""

import ctypes

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import fused_loss_cuda
from glassformer.kernels.toolchain import nvrtc

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS_TIMES = 2**14
"""What the loss's gradients are multiplied by: the inverse of fp8.GRADIENT_UNIT."""
KINDS = ("relu", "relu2", "silu", "gelu_tanh", "gelu", "tanh")
DOWN, ACROSS, RUN = 128, 128, 4
"""As in fp8.cu: a tile's rows and columns, and the eights of a thread where nothing is turned. A block has 2 DOWN
threads."""
TURNED = 256
"""The tile's rows where nothing is cast: 8 % faster there."""
MULTIPLE = 16
MOST, PARTS, THREADS = 4, 528, 256
"""Of squares.cu: tensors of a launch, blocks of a tensor (four a multiprocessor of an H200), and threads of a block."""
SAMPLED_FROM = 2**22
"""Numbers of a tensor of which a mean square may read an eighth."""
POINTERS = ("x", "pre", "unit", "post_unit", "out", "turned", "post_turned", "sums")


class Given(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "real", "stride", "turned_stride")),
    ]


class Several(ctypes.Structure):
    """The argument of squares.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * MOST),
        ("numbers", ctypes.c_int64 * MOST),
        ("wide", ctypes.c_int32 * MOST),
        ("sampled", ctypes.c_int32 * MOST),
        ("parts", ctypes.c_void_p),
    ]


def source(**macros: int) -> str:
    """`macros`: those of fp8.cu that are not 0."""
    chosen = {"DOWN": DOWN, "WIDE": 0, "SHORT": 0, "KIND": 0, "SUMMED": 0, **macros}
    return fused_loss_cuda.with_macros(chosen, "floats.cuh", "eight.cuh", "fp8.cu")


def launch(
    name: str, shape: torch.Size, blocks: int, macros: dict[str, int], real: int | None = None, **tensors: Tensor
) -> None:
    """Run a kernel on matrices of this shape, by the names that `Given` has for them. What is written may be a part of
    wider matrices; what is read has `real` rows."""
    some = next(iter(tensors.values()))
    strides = [tensors[key].stride(0) if key in tensors else 0 for key in ("out", "turned")]
    sizes = (shape[0], shape[1], shape[0] if real is None else real, *strides)
    given = Given(**{key: t.data_ptr() for key, t in tensors.items()})
    given.rows, given.columns, given.real, given.stride, given.turned_stride = sizes
    nvrtc.kernel(source(**macros), name, some.device.index or 0).launch(given, blocks, 2 * macros.get("DOWN", DOWN))


def tiles(shape: torch.Size, down: int = DOWN) -> int:
    """How many blocks take a matrix."""
    assert all(n % MULTIPLE == 0 for n in shape), shape
    return -(-shape[0] // down) * -(-shape[1] // ACROSS)


def _both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape[::-1], dtype=dtype, device=x.device)


def cast_all(
    parts: list[Tensor], unit: Tensor, dtype: torch.dtype, beside: bool, rows: int | None
) -> tuple[Tensor, Tensor]:
    """As fp8.cast_all: each part by a launch that writes where it belongs."""
    axis = int(beside)
    sizes = [x.shape[axis] for x in parts]
    if rows is not None:
        sizes[-1] += rows - sum(sizes)
    shape = (len(parts[0]), sum(sizes)) if beside else (sum(sizes), parts[0].shape[1])
    out = torch.empty(shape, dtype=dtype, device=unit.device)
    turned = torch.empty(shape[::-1], dtype=dtype, device=unit.device)
    places = zip(parts, out.split(sizes, axis), turned.split(sizes, 1 - axis), strict=True)
    for part, here, there in places:
        x = part.contiguous()
        assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
        macros = {"WIDE": int(x.dtype is torch.float32), "SHORT": int(dtype is E5M2)}
        launch("cast", here.shape, tiles(here.shape), macros, len(x), x=x, unit=unit, out=here, turned=there)
    return out, turned


def activate(pre: Tensor, unit: Tensor, kind: str) -> Tensor:
    """As fp8.activate."""
    pre = pre.contiguous()
    assert pre.dtype is torch.bfloat16
    assert pre.numel() % 8 == 0
    out = torch.empty(pre.shape, dtype=E4M3, device=pre.device)
    blocks = -(-pre.numel() // (8 * RUN * 2 * DOWN))
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


def square_parts(tensors: list[Tensor], sampled: bool) -> Tensor:
    """As fp8.square_parts."""
    tensors = [t.contiguous() for t in tensors]
    assert all(t.dtype in (torch.bfloat16, torch.float32) and t.numel() % MULTIPLE == 0 for t in tensors)
    chosen = [sampled and t.numel() >= SAMPLED_FROM for t in tensors]
    lines = [t.numel() * t.element_size() // 1024 for t in tensors]  # that are read of those
    numbers = [n * 128 // t.element_size() if c else t.numel() for t, c, n in zip(tensors, chosen, lines, strict=True)]
    parts = torch.empty(len(tensors), PARTS, device=tensors[0].device)
    text = fused_loss_cuda.with_macros({"MOST": MOST, "PARTS": PARTS}, "squares.cu")
    given = Several(
        (ctypes.c_void_p * MOST)(*(t.data_ptr() for t in tensors)),
        (ctypes.c_int64 * MOST)(*numbers),
        (ctypes.c_int32 * MOST)(*(int(t.dtype is torch.float32) for t in tensors)),
        (ctypes.c_int32 * MOST)(*map(int, chosen)),
        parts.data_ptr(),
    )
    nvrtc.kernel(text, "squares", parts.device.index or 0).launch(given, len(tensors) * PARTS, THREADS)
    return parts


def turn(x: Tensor) -> Tensor:
    """As fp8.turn."""
    x = x.contiguous()
    turned = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    launch("turn", x.shape, tiles(x.shape, TURNED), {"DOWN": TURNED}, x=x, turned=turned)
    return turned


def loss_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fp8.loss_gradients."""
    assert fused_loss_cuda.fits(logits)
    gradients = torch.empty(logits.shape, dtype=E5M2, device=logits.device)
    rows = fused_loss_cuda.write_gradients(
        logits, gradients, targets, ignored, smoothing, z_loss, columns, eight=GRADIENTS_TIMES
    )
    return rows[0].sum(), rows[1].sum(), gradients, turn(gradients)
