"""The compiled kernels of a training step, and the structures they are called with."""

import ctypes
from functools import cache
from pathlib import Path

from glassformer.kernels.toolchain import cxx

SOURCE = Path(__file__).parent / "train.cpp"
FLAGS = (*cxx.FLAGS, "-fopenmp")
"""OpenMP shares torch's threads."""


class Heads(ctypes.Structure):
    """Address and strides (in elements, the last one 1) of a tensor (batch, head, time, width)."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "time"))]


class Task(ctypes.Structure):
    """Arguments of attention, forward and backward."""

    _fields_ = [
        *((name, Heads) for name in ("q", "k", "v", "o", "d_o", "d_q", "d_k", "d_v")),
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n_batch", "n_heads", "n_kv_heads", "n_queries", "n_keys")),
        *((name, ctypes.c_int64) for name in ("width", "value_width")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("causal", "is_bf16")),
    ]


class FeedForward(ctypes.Structure):
    """Arguments of a feed-forward, forward and backward."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "up", "down", "up_bias", "down_bias", "pre", "out", "gradient")),
        *((name, ctypes.c_void_p) for name in ("d_x", "d_up", "d_down", "d_up_bias")),
        *((name, ctypes.c_int64) for name in ("n", "width", "hidden")),
        ("tanh", ctypes.c_int32),
    ]


FUNCTIONS = {
    f"glass_{name}": (None, [ctypes.POINTER(structure), ctypes.c_int32])
    for name, structure in (("attention", Task), ("feed", FeedForward))
}


@cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if necessary. Raise CompileError if that fails."""
    return cxx.load(SOURCE, FLAGS, (Task, FeedForward), FUNCTIONS)
