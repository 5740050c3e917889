"""The structures of decode.cpp, field by field. `library.load` compares their sizes with the compiled ones."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p


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


class Piece(ctypes.Structure):
    """A range of memory."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64))
