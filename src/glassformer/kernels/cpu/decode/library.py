"""The compiled CPU kernels, and the structures that they are called with, field by field as in model.h and rows.h."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from glassformer.errors import GlassformerError
from glassformer.kernels.toolchain import cxx

SOURCE = Path(__file__).parent / "decode.cpp"
FLAGS = (*cxx.FLAGS, "-pthread")


class NativeError(GlassformerError):
    """CPU kernels that cannot be used here. One sentence."""


class Matrix(ctypes.Structure):
    """y = weights x + bias; int8 weights have one scale per row and group of columns."""

    _fields_ = (
        ("weights", c_void_p), ("scales", c_void_p), ("bias", c_void_p),
        ("rows", c_int32), ("columns", c_int32), ("group", c_int32), ("kind", c_int32),
    )  # fmt: skip


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("centred", c_int32))


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention", Norm), ("feedforward", Norm), ("q", Norm), ("k", Norm),
        *((name, Matrix) for name in ("q_of", "k_of", "v_of", "out", "gate", "up", "down")), ("window", c_int32),
    )  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "d_model", "heads", "kv_heads", "d_head", "d_value", "d_ff")),
        *((name, c_int32) for name in ("vocabulary", "placement", "activation", "gated", "position", "rotated")),
        ("scale", c_float), ("embed_scale", c_float), ("head_scale", c_float),
        *((name, c_void_p) for name in ("tokens", "position_table", "cosines", "sines", "slopes")),
        ("embedded", Norm), ("last", Norm), ("head", Matrix), ("layer", POINTER(Layer)),
    )  # fmt: skip


class Cache(ctypes.Structure):
    """Keys and values (layers, sequences, kv_heads, capacity, width)."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("sequences", c_int32), ("capacity", c_int32))


class MemoryRange(ctypes.Structure):
    """A range of memory."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64))


FUNCTIONS = {
    "glass_step": (None, [POINTER(Model), POINTER(Cache), c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p]),
    "glass_next": (c_int32, [POINTER(Model), POINTER(Cache), c_void_p, c_void_p, c_int32, c_void_p]),
    "glass_multiply": (None, [POINTER(Matrix), c_void_p, c_int32, c_int32, c_void_p]),
    "glass_checksum": (c_uint64, [POINTER(MemoryRange), c_int32, c_int32]),
}


def unavailable() -> str | None:
    """Return why the kernels cannot be compiled on this machine, or None if they can."""
    return None if cxx.compiler() is not None else "no C++ compiler was found (c++, g++ or clang++)"


@cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if necessary."""
    try:
        return cxx.load(SOURCE, FLAGS, (Matrix, Norm, Layer, Model, Cache), FUNCTIONS)
    except cxx.CompileError as error:
        raise NativeError(f"{str(error).rstrip('.')}, or use engine='torch'.") from None
