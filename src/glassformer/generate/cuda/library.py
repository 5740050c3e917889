"""The persistent kernel's source for one model, and its argument."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

SHARED = ("sizes.cuh", "machine.cuh", "rows.cuh", "keys.cuh")
DECODE = (*SHARED, "heads.cuh", "decode.cu")
INTEGERS = ("tokens", "counter", "best_at", "windows")
MATRICES = ("table", "head", "w_qkv", "w_out", "w_up", "w_down")
VECTORS = (
    "places", "cosines", "sines", "norm_a", "norm_a_bias", "norm_f", "norm_f_bias", "last_norm", "last_norm_bias",
    "head_bias", "b_qkv", "b_out", "b_up", "b_down",
)  # fmt: skip
WRITTEN = ("keys", "values", "qkv", "peaks", "sums", "parts", "mix", "hidden", "fed", "best", "logits")
TENSORS = (*INTEGERS, *MATRICES, *VECTORS, *WRITTEN)
"""In the order of `struct Given` (heads.cuh)."""


class CudaDecodeError(ValueError):
    """What the kernel cannot do. One sentence."""


class Given(ctypes.Structure):
    """The kernel's one argument, passed by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_float) for name in ("embed_scale", "head_scale", "scale", "eps")),
        *((name, ctypes.c_int32) for name in ("place", "count", "capacity", "splits")),
    ]


def source(sizes: Mapping[str, int], parts: tuple[str, ...] = DECODE, machine: str | None = None) -> str:
    """The kernels for a model of these sizes; `machine` stands in for machine.cuh in tests."""
    texts = [
        machine if machine is not None and part == "machine.cuh" else (Path(__file__).parent / part).read_text()
        for part in parts
    ]
    return "\n".join([*(f"#define {name} {value}" for name, value in sizes.items()), *texts])
