"""The compiled CPU kernels: built once per machine and source, cached on disk, loaded with ctypes."""

import ctypes
from functools import cache
from pathlib import Path

from glassformer.errors import GlassformerError
from glassformer.kernels.toolchain import cxx
from glassformer.kernels.toolchain.cxx import compiler

SOURCES = (
    *("decode.cpp", "kernels.h", "mark.h", "model.h", "packed.h", "panels.h", "pointwise.h", "pool.h", "shares.h"),
    "tiles.h",
    "vectors.h",
)
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-trapping-math", "-fno-math-errno"
)  # fmt: skip
"""The last two let the compiler vectorise loops with a comparison; they do not change results."""


class NativeError(GlassformerError):
    """CPU kernels that cannot be used here. One sentence."""


def unavailable() -> str | None:
    """Return why the kernels cannot be compiled on this machine, or None if they can."""
    return None if compiler() is not None else "no C++ compiler was found (c++, g++ or clang++)"


def build() -> Path:
    """Compile the kernels, unless that was done before, and return the path of the library."""
    try:
        return cxx.built(Path(__file__).parent, SOURCES, FLAGS, "glass")
    except cxx.CompileError as error:
        raise NativeError(f"{str(error).rstrip('.')}, or use engine='torch'.") from None


@cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if necessary."""
    from glassformer.kernels.cpu.decode import structures as s

    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded ({error}): remove it, or use engine='torch'.") from None
    pointer = ctypes.c_void_p
    model, number = (ctypes.POINTER(s.Model), ctypes.POINTER(s.Cache)), ctypes.c_int32
    library.glass_step.argtypes = [*model, pointer, number, pointer, number, number, pointer]
    library.glass_step.restype = None
    library.glass_next.argtypes = [*model, pointer, pointer, number, pointer]
    library.glass_next.restype = number
    library.glass_multiply.argtypes = [ctypes.POINTER(s.Matrix), pointer, number, number, pointer]
    library.glass_multiply.restype = None
    library.glass_mark.argtypes = [ctypes.POINTER(s.Piece), number, number]
    library.glass_mark.restype = ctypes.c_uint64
    try:
        cxx.check_sizes(library, (s.Matrix, s.Norm, s.Layer, s.Model, s.Cache))
    except cxx.CompileError as error:
        raise NativeError(f"{str(error).rstrip('.')}: use engine='torch'.") from None
    return library
