"""The compiled kernels of a training step, and the structures they are called with."""

import ctypes
from functools import cache
from pathlib import Path

from glassformer.kernels.toolchain import cxx

SOURCES = (
    "train.cpp", "attention.h", "feedforward.h", "linear.h", "activation.h", "pairs.h", "matmul.h", "vectors.h"
)  # fmt: skip
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-trapping-math", "-fno-math-errno"
)  # fmt: skip
"""The last two let the compiler vectorize comparisons; they change no result. OpenMP shares torch's threads."""


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


MOST_LAYERS = 3
"""Largest number of linear layers that read one input."""


class Layers(ctypes.Structure):
    """Arguments of linear layers of one input, forward and backward."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_void_p * MOST_LAYERS) for name in ("weight", "bias", "out", "gradient")),
        ("d_x", ctypes.c_void_p),
        ("d_weight", ctypes.c_void_p * MOST_LAYERS),
        ("n", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("size", ctypes.c_int64 * MOST_LAYERS),
        ("count", ctypes.c_int32),
    ]


@cache
def load() -> ctypes.CDLL:
    """Return the library, compiled first if it is missing. Raise CompileError if that fails."""
    path = cxx.built(Path(__file__).parent, SOURCES, FLAGS, "train")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise cxx.CompileError(f"the compiled kernels cannot be loaded ({error}).") from None
    cxx.check_sizes(library, (Task, FeedForward, Layers))
    for name, structure in (("attention", Task), ("feed", FeedForward), ("linear", Layers)):
        function = getattr(library, f"glass_{name}")
        function.argtypes = [ctypes.POINTER(structure), ctypes.c_int32]
        function.restype = None
    return library
