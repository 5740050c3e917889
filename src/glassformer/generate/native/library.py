"""The compiled kernels: built once per machine and source, kept in the user's cache, loaded with ctypes."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = (
    *("decode.cpp", "kernels.h", "mark.h", "model.h", "packed.h", "panels.h", "pointwise.h", "pool.h", "shares.h"),
    "vectors.h",
)
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-trapping-math", "-fno-math-errno"
)  # fmt: skip
"""The last two let loops with a comparison become vectors; they change no result."""
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120
"""After which a compiler is given up on; it takes about six."""


class NativeError(ValueError):
    """Kernels that cannot be had here. One sentence."""


@cache
def compiler() -> str | None:
    """The C++ compiler ($CXX, or the usual names), or None."""
    named = os.environ.get("CXX")
    return next((found for name in (named, *COMPILERS) if name and (found := shutil.which(name))), None)


@cache
def library_path() -> Path:
    """Where the library for this source, compiler and processor lies, or will lie."""
    import platformdirs

    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for fact in (*FLAGS, compiler() or "", _processor(), platform.machine()):
        digest.update(fact.encode())
    folder = Path(os.environ.get("GLASSFORMER_CACHE") or platformdirs.user_cache_dir("glassformer"))
    return folder / "native" / f"glass-{digest.hexdigest()[:16]}.so"


def _processor() -> str:
    """What `-march=native` depends on: a cache that travels with a home folder must not serve another processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def is_built() -> bool:
    return compiler() is not None and library_path().exists()


def build() -> Path:
    """Compile unless it is there already; returns the library. Written beside and renamed."""
    path, found = library_path(), compiler()
    if path.exists():
        return path
    if found is None:
        raise NativeError("no C++ compiler was found (c++, g++ or clang++): install one, or use engine='torch'.")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).parent / SOURCES[0]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [found, *FLAGS, str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeError(f"{found} could not compile the kernels ({error}): use engine='torch'.") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NativeError(f"{found} could not compile the kernels ({reason}): use engine='torch'.")
        os.replace(made, path)
    return path


@cache
def load() -> ctypes.CDLL:
    """The library, built first where it is missing."""
    from glassformer.generate.native import structures as s

    library = ctypes.CDLL(str(build()))
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
    for what, mirror in enumerate((s.Matrix, s.Norm, s.Layer, s.Model, s.Cache)):
        if library.glass_sizes(what) != ctypes.sizeof(mirror):
            raise NativeError(f"the kernels lay out {mirror.__name__} differently: use engine='torch'.")
    return library
