"""The source of the CUDA decode kernels for one model, and the argument of the persistent kernel."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

from glassformer.errors import GlassformerError
from glassformer.kernels.toolchain import nvrtc

SHARED = ("sizes.cuh", "machine.cuh", "rows.cuh", "keys.cuh")
DECODE = (*SHARED, "cluster.cuh", "stream.cuh", "heads.cuh", "decode.cu")
TENSORS = (
    "tokens", "windows", "weights", "table", "position_table", "cosines", "sines", "norm_a", "norm_a_bias", "norm_f",
    "norm_f_bias", "last_norm", "last_norm_bias", "b_out", "b_down", "keys", "values", "lines", "best", "logits",
)  # fmt: skip
"""The pointers of `struct Arguments` (heads.cuh), in order."""


class CudaDecodeError(GlassformerError):
    """A request that the kernel cannot serve. One sentence."""


class Arguments(ctypes.Structure):
    """The argument of the persistent kernel, passed by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_float) for name in ("embed_scale", "scale", "head_scale", "eps")),
        *((name, ctypes.c_int32) for name in ("position", "count", "capacity")),
        ("tag", ctypes.c_uint32),
    ]


def source(sizes: Mapping[str, int], parts: tuple[str, ...] = DECODE, instead: Mapping[str, str] | None = None) -> str:
    """Return the source for a model of these sizes. `instead` replaces parts, for the emulation in tests."""
    return nvrtc.source(Path(__file__).parent, parts, sizes, instead)
