"""The compiled CPU kernels, and the structures that they are called with, field by field as in the headers."""

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


class Branch(ctypes.Structure):
    """The norms before and after attention or a feed-forward, and after the sum; without weights: none."""

    _fields_ = (("before", Norm), ("out", Norm), ("after", Norm))


class FeedForward(ctypes.Structure):
    """down(activation(gate(x)) * (up(x) + up_offset)), or down(activation(up(x))) without a gate."""

    _fields_ = (
        *((name, Matrix) for name in ("gate", "up", "down")),
        ("limit", c_float), ("up_offset", c_float), ("activation", c_int32),
    )  # fmt: skip


class Experts(ctypes.Structure):
    """A mixture of experts; `expert` has `count` feed-forwards, and the shared one after them if there is one."""

    _fields_ = (
        ("router", Matrix), ("shared_gate", Matrix), ("correction", c_void_p), ("expert", POINTER(FeedForward)),
        ("scale", c_float),
        *((name, c_int32) for name in ("count", "active", "has_shared", "score", "normalize")),
        *((name, c_int32) for name in ("groups", "top_groups", "group_score")),
    )  # fmt: skip


class Latent(ctypes.Structure):
    """One vector of a token in place of keys and values; `absorb` and `value` have one matrix for each head."""

    _fields_ = (
        ("q_down", Matrix), ("q_down_norm", Norm), ("c_norm", Norm),
        ("absorb", POINTER(Matrix)), ("value", POINTER(Matrix)),
        *((name, c_int32) for name in ("rank", "d_shared", "d_query", "d_value")),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention", Branch), ("cross", Branch), ("feedforward", Branch), ("q", Norm), ("k", Norm), ("cross_q", Norm),
        *((name, Matrix) for name in ("q_of", "k_of", "v_of", "out", "cross_q_of", "cross_out")),
        ("latent", Latent), ("feed", FeedForward), ("experts", Experts),
        *((name, c_void_p) for name in ("cosines", "sines", "sinks", "cross_sinks")),
        *((name, c_int32) for name in ("window", "rotated", "pairing")),
    )  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "d_model", "heads", "kv_heads", "d_head", "d_value", "vocabulary")),
        *((name, c_int32) for name in ("causal", "parallel", "qk_over", "qk_last", "reach")),
        *((name, c_float) for name in ("scale", "embed_scale", "head_scale", "residual_scale")),
        *((name, c_float) for name in ("softcap", "head_softcap", "clip")),
        *((name, c_void_p) for name in ("tokens", "position_table", "biases")),
        ("embedded", Norm), ("last", Norm), ("head", Matrix), ("layer", POINTER(Layer)),
    )  # fmt: skip


class Cache(ctypes.Structure):
    """Keys and values (layers, sequences, kv_heads, capacity, width), of the sequences and of what an encoder read."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cross_keys", "cross_values", "cross_lengths", "rotations")),
        *((name, c_int32) for name in ("sequences", "capacity", "cross_capacity", "halves")),
    )


class MemoryRange(ctypes.Structure):
    """A range of memory."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64))


FUNCTIONS = {
    "glass_step": (None, [POINTER(Model), POINTER(Cache), c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p]),
    "glass_encode": (None, [POINTER(Model), c_void_p, c_int32, c_void_p, c_int32, c_void_p]),
    "glass_next": (c_int32, [POINTER(Model), POINTER(Cache), c_void_p, c_void_p, c_int32, c_void_p]),
    "glass_multiply": (None, [POINTER(Matrix), c_void_p, c_int32, c_int32, c_void_p]),
    "glass_has_halves": (c_int32, []),
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
