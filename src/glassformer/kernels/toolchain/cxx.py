"""C++ compiled on demand by the compiler of the machine: once per source and processor, cached on disk."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from glassformer.errors import GlassformerError
from glassformer.files import cache_folder
from glassformer.model.device import processor_description

COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120
"""Time limit of the compiler, which usually takes a few seconds."""


class CompileError(GlassformerError):
    """Kernels that cannot be compiled here. One sentence."""


@cache
def compiler() -> str | None:
    """Return the C++ compiler ($CXX, or the usual names), or None."""
    named = os.environ.get("CXX")
    return next((found for name in (named, *COMPILERS) if name and (found := shutil.which(name))), None)


def built(folder: Path, sources: Sequence[str], flags: Sequence[str], name: str) -> Path:
    """Return the library of some sources. The first is compiled, unless that was done; written atomically."""
    path, found = library_path(folder, sources, flags, name), compiler()
    if path.exists():
        return path
    if found is None:
        raise CompileError("no C++ compiler was found (c++, g++ or clang++): install one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        command = [found, *flags, str(folder / sources[0]), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{found} could not compile {sources[0]} ({error}).") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CompileError(f"{found} could not compile {sources[0]} ({reason}).")
        os.replace(made, path)
    return path


def library_path(folder: Path, sources: Sequence[str], flags: Sequence[str], name: str) -> Path:
    """Return the path of the library for these sources, this compiler and this processor."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update((folder / source).read_bytes())
    for fact in (*flags, compiler() or "", processor_description(), platform.machine()):
        digest.update(fact.encode())
    return cache_folder() / "native" / f"{name}-{digest.hexdigest()[:16]}.so"


def check_sizes(library: ctypes.CDLL, mirrors: Sequence[type[ctypes.Structure]]) -> None:
    """Refuse structures whose size differs from the compiled one; `glass_sizes(n)` returns that of the n-th."""
    library.glass_sizes.restype = ctypes.c_int64
    for number, mirror in enumerate(mirrors):
        if library.glass_sizes(number) != ctypes.sizeof(mirror):
            raise CompileError(f"the compiled kernels lay out {mirror.__name__} differently.")


def is_intel() -> bool:
    """Return whether the operating system reports an Intel processor."""
    return "Intel" in processor_description()


def register_bits() -> int:
    """Return the bits of the vector registers: 512 with AVX-512, 256 with AVX2 and FMA, otherwise 128."""
    flags = set(processor_description().split())
    return 512 if "avx512f" in flags else 256 if {"avx2", "fma"} <= flags else 128
