"""The kernels of fp8.py in CUDA C++ (fp8.cu): each cast reads its input once and writes it row-major and transposed.

Only for CUDA. Tests compile them for the CPU and compare them with the definitions in fp8.py.
"""

import ctypes

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import loss
from glassformer.kernels.toolchain import nvrtc

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_SCALE = 2.0**-14
"""Scale of the gradient with respect to the logits, which lies within [-1, 1] without a z-loss."""
KINDS = ("relu", "relu2", "silu", "gelu_tanh", "gelu", "tanh")
DOWN, ACROSS, RUN = 128, 128, 4
"""As in fp8.cu: rows and columns of a tile, and groups of eight numbers of a thread in `activate`. A block has 2 DOWN
threads."""
TRANSPOSE_DOWN = 256
"""Rows of a tile in `transpose`, where nothing is cast: 8 % faster there than DOWN."""
MULTIPLE = 16
"""Every dimension of a float8 matmul on a GPU must be a multiple of this."""
MOST, PARTS, THREADS = 4, 528, 256
"""Of squares.cu: tensors of a launch, blocks of a tensor (four per multiprocessor of an H200), threads of a block."""
SAMPLED_FROM = 2**22
"""Size from which on a mean square may read an eighth of a tensor."""
POINTERS = ("x", "pre", "scale", "post_scale", "out", "transposed", "post_transposed", "sums")


class Arguments(ctypes.Structure):
    """The arguments struct of the kernels of fp8.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "real", "stride", "transposed_stride")),
    ]


class SquaresArguments(ctypes.Structure):
    """The arguments struct of squares.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * MOST),
        ("numbers", ctypes.c_int64 * MOST),
        ("wide", ctypes.c_int32 * MOST),
        ("sampled", ctypes.c_int32 * MOST),
        ("parts", ctypes.c_void_p),
    ]


def source(**macros: int) -> str:
    """Return the CUDA source. `macros` are those of fp8.cu that are not 0."""
    chosen = {"DOWN": DOWN, "WIDE": 0, "SHORT": 0, "KIND": 0, "SUMMED": 0, **macros}
    return nvrtc.source(loss.FOLDER, ("floats.cuh", "float8.cuh", "fp8.cu"), chosen)


def launch(
    name: str, shape: torch.Size, blocks: int, macros: dict[str, int], real: int | None = None, **tensors: Tensor
) -> None:
    """Run a kernel on matrices of this shape, given by the field names of `Arguments`. Outputs may be views of wider
    matrices; the input has `real` rows."""
    some = next(iter(tensors.values()))
    strides = [tensors[key].stride(0) if key in tensors else 0 for key in ("out", "transposed")]
    sizes = (shape[0], shape[1], shape[0] if real is None else real, *strides)
    given = Arguments(**{key: t.data_ptr() for key, t in tensors.items()})
    given.rows, given.columns, given.real, given.stride, given.transposed_stride = sizes
    nvrtc.kernel(source(**macros), name, some.device.index or 0).launch(given, blocks, 2 * macros.get("DOWN", DOWN))


def tiles(shape: torch.Size, down: int = DOWN) -> int:
    """Return the number of tiles, and so of blocks, of a matrix."""
    assert all(n % MULTIPLE == 0 for n in shape), shape
    return -(-shape[0] // down) * -(-shape[1] // ACROSS)


def _both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape[::-1], dtype=dtype, device=x.device)


def cast_all(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, side_by_side: bool, rows: int | None
) -> tuple[Tensor, Tensor]:
    """As fp8.cast_all. Each part is one launch, which writes to its slice of the result."""
    axis = int(side_by_side)
    sizes = [x.shape[axis] for x in parts]
    if rows is not None:
        sizes[-1] += rows - sum(sizes)
    shape = (len(parts[0]), sum(sizes)) if side_by_side else (sum(sizes), parts[0].shape[1])
    out = torch.empty(shape, dtype=dtype, device=scale.device)
    transposed = torch.empty(shape[::-1], dtype=dtype, device=scale.device)
    slices = zip(parts, out.split(sizes, axis), transposed.split(sizes, 1 - axis), strict=True)
    for part, here, there in slices:
        x = part.contiguous()
        assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
        macros = {"WIDE": int(x.dtype is torch.float32), "SHORT": int(dtype is E5M2)}
        launch("cast", here.shape, tiles(here.shape), macros, len(x), x=x, scale=scale, out=here, transposed=there)
    return out, transposed


def activate(pre: Tensor, scale: Tensor, kind: str) -> Tensor:
    """As fp8.activate."""
    pre = pre.contiguous()
    assert pre.dtype is torch.bfloat16
    assert pre.numel() % 8 == 0
    out = torch.empty(pre.shape, dtype=E4M3, device=pre.device)
    blocks = -(-pre.numel() // (8 * RUN * 2 * DOWN))
    launch("activate", pre.shape, blocks, {"KIND": KINDS.index(kind)}, pre=pre, scale=scale, out=out)
    return out


def activate_backward(
    d_post: Tensor, pre: Tensor, scale: Tensor, post_scale: Tensor, kind: str, summed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fp8.activate_backward. Tiles are summed first and then added in one order: the same result in every run."""
    d_post, pre = d_post.contiguous(), pre.contiguous()
    assert d_post.dtype is pre.dtype is torch.bfloat16
    out, transposed = _both(pre, E5M2)
    post_transposed = torch.empty(pre.shape[::-1], dtype=E4M3, device=pre.device)
    sums = torch.empty(-(-len(pre) // DOWN) if summed else 0, pre.shape[1], device=pre.device)
    macros = {"KIND": KINDS.index(kind), "SUMMED": int(summed)}
    launch(
        "activate_backward", pre.shape, tiles(pre.shape), macros,
        x=d_post, pre=pre, scale=scale, post_scale=post_scale,
        out=out, transposed=transposed, post_transposed=post_transposed, sums=sums,
    )  # fmt: skip
    return out, transposed, post_transposed, sums.sum(0) if summed else sums.new_empty(0)


def square_parts(tensors: list[Tensor], sampled: bool) -> Tensor:
    """As fp8.square_parts."""
    tensors = [t.contiguous() for t in tensors]
    assert all(t.dtype in (torch.bfloat16, torch.float32) and t.numel() % MULTIPLE == 0 for t in tensors)
    chosen = [sampled and t.numel() >= SAMPLED_FROM for t in tensors]
    lines = [t.numel() * t.element_size() // 1024 for t in tensors]  # of 128 bytes that a sample reads
    numbers = [n * 128 // t.element_size() if c else t.numel() for t, c, n in zip(tensors, chosen, lines, strict=True)]
    parts = torch.empty(len(tensors), PARTS, device=tensors[0].device)
    text = nvrtc.source(loss.FOLDER, ("squares.cu",), {"MOST": MOST, "PARTS": PARTS})
    given = SquaresArguments(
        (ctypes.c_void_p * MOST)(*(t.data_ptr() for t in tensors)),
        (ctypes.c_int64 * MOST)(*numbers),
        (ctypes.c_int32 * MOST)(*(int(t.dtype is torch.float32) for t in tensors)),
        (ctypes.c_int32 * MOST)(*map(int, chosen)),
        parts.data_ptr(),
    )
    nvrtc.kernel(text, "squares", parts.device.index or 0).launch(given, len(tensors) * PARTS, THREADS)
    return parts


def transpose(x: Tensor) -> Tensor:
    """As fp8.transpose."""
    x = x.contiguous()
    transposed = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    launch("transpose", x.shape, tiles(x.shape, TRANSPOSE_DOWN), {"DOWN": TRANSPOSE_DOWN}, x=x, transposed=transposed)
    return transposed


def loss_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fp8.loss_gradients."""
    gradients = torch.empty(logits.shape, dtype=E5M2, device=logits.device)
    rows = loss.write_gradients(
        logits, gradients, targets, ignored, smoothing, z_loss, columns, float8_factor=int(1 / GRADIENT_SCALE)
    )
    return rows[0].sum(), rows[1].sum(), gradients, transpose(gradients)
