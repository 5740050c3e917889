"""The persistent kernel's source for one model, and its argument."""

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
"""In the order of `struct Arguments` (heads.cuh)."""


class CudaDecodeError(GlassformerError):
    """What the kernel cannot do. One sentence."""


class Arguments(ctypes.Structure):
    """The kernel's one argument, passed by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_float) for name in ("embed_scale", "scale", "head_scale", "eps")),
        *((name, ctypes.c_int32) for name in ("position", "count", "capacity")),
        ("tag", ctypes.c_uint32),
    ]


def source(sizes: Mapping[str, int], parts: tuple[str, ...] = DECODE, instead: Mapping[str, str] | None = None) -> str:
    """The kernels for a model of these sizes; tests have other texts `instead` of the machine's parts."""
    here = Path(__file__).parent
    texts = [(instead or {}).get(part) or (here / part).read_text() for part in parts]
    return nvrtc.with_macros(sizes, texts)
