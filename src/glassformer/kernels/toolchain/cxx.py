"""C++ compiled on demand by the machine's own compiler: once per source and processor, kept in the user's cache."""

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
"""After which a compiler is given up on; it takes a few."""


class CompileError(GlassformerError):
    """Kernels that cannot be had here. One sentence."""


@cache
def compiler() -> str | None:
    """The C++ compiler ($CXX, or the usual names), or None."""
    named = os.environ.get("CXX")
    return next((found for name in (named, *COMPILERS) if name and (found := shutil.which(name))), None)


def built(folder: Path, sources: Sequence[str], flags: Sequence[str], name: str) -> Path:
    """The library of some sources, the first of which is compiled unless that was done. Written beside and renamed."""
    path, found = library_path(folder, sources, flags, name), compiler()
    if path.exists():
        return path
    if found is None:
        raise CompileError("no C++ compiler was found (c++, g++ or clang++): install one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        made = Path(beside) / path.name
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
    """Where the library for these sources, this compiler and this processor lies, or will lie."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update((folder / source).read_bytes())
    for fact in (*flags, compiler() or "", processor_description(), platform.machine()):
        digest.update(fact.encode())
    return cache_folder() / "native" / f"{name}-{digest.hexdigest()[:16]}.so"


def check_sizes(library: ctypes.CDLL, mirrors: Sequence[type[ctypes.Structure]]) -> None:
    """Structures must have the size that the compiler gave them; `glass_sizes(n)` says it of the n-th."""
    library.glass_sizes.restype = ctypes.c_int64
    for number, mirror in enumerate(mirrors):
        if library.glass_sizes(number) != ctypes.sizeof(mirror):
            raise CompileError(f"the compiled kernels lay out {mirror.__name__} differently.")


def is_intel() -> bool:
    """Whether Intel made the processor, as the system says."""
    return "Intel" in processor_description()


def register_bits() -> int:
    """Bits of the processor's vector registers, as the system says: 512 with AVX-512, 256 with AVX2, else 128."""
    flags = set(processor_description().split())
    return 512 if "avx512f" in flags else 256 if {"avx2", "fma"} <= flags else 128
