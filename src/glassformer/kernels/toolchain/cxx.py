"""C++ compiled on demand by the compiler of the machine: once per source and processor, cached on disk."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from glassformer.errors import GlassformerError
from glassformer.files import cache_folder
from glassformer.model.device import processor_description

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fno-trapping-math", "-fno-math-errno")
"""The last two let the compiler vectorise loops with a comparison; they do not change results."""
SECONDS = 120
"""Time limit of the compiler, which usually takes a few seconds."""


class CompileError(GlassformerError):
    """Kernels that cannot be compiled here. One sentence."""


@cache
def compiler() -> str | None:
    """Return the C++ compiler ($CXX, or the usual names), or None."""
    named = os.environ.get("CXX")
    return next((found for name in (named, *COMPILERS) if name and (found := shutil.which(name))), None)


def build(source: Path, flags: Sequence[str] = FLAGS) -> Path:
    """Return the library of a C++ source, compiled unless that was done before, and written atomically."""
    path, found = library_path(source, flags), compiler()
    if path.exists():
        return path
    if found is None:
        raise CompileError("no C++ compiler was found (c++, g++ or clang++): install one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        try:
            done = subprocess.run(
                [found, *flags, str(source), "-o", str(made)],
                capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{found} could not compile {source.name} ({error}).") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CompileError(f"{found} could not compile {source.name} ({reason}).")
        os.replace(made, path)
    return path


def library_path(source: Path, flags: Sequence[str]) -> Path:
    """Return the path of the library for a source with the headers around it, this compiler and this processor."""
    headers = [*source.parent.glob("*.h"), *source.parent.parent.glob("*.h")]
    digest = hashlib.sha256()
    for file in (source, *sorted(headers)):
        digest.update(file.read_bytes())
    for fact in (*flags, compiler() or "", processor_description(), platform.machine()):
        digest.update(fact.encode())
    return cache_folder() / "native" / f"{source.stem}-{digest.hexdigest()[:16]}.so"


def load(
    source: Path,
    flags: Sequence[str],
    structures: Sequence[type[ctypes.Structure]],
    functions: Mapping[str, tuple[Any, Sequence[Any]]],
) -> ctypes.CDLL:
    """Return the library of a source, with (result, arguments) of its functions declared.

    Raise CompileError if it cannot be built or loaded, or if a structure has another size than the compiled one, which
    `glass_sizes(n)` returns for the n-th.
    """
    path = build(source, flags)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"the compiled kernels {path} cannot be loaded ({error}): remove the file.") from None
    library.glass_sizes.restype = ctypes.c_int64
    for number, structure in enumerate(structures):
        if library.glass_sizes(number) != ctypes.sizeof(structure):
            raise CompileError(f"the compiled kernels lay out {structure.__name__} differently.")
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def is_intel() -> bool:
    """Return whether the operating system reports an Intel processor."""
    return "Intel" in processor_description()


def register_bits() -> int:
    """Return the bits of the vector registers: 512 with AVX-512, 256 with AVX2 and FMA, otherwise 128."""
    flags = set(processor_description().split())
    return 512 if "avx512f" in flags else 256 if {"avx2", "fma"} <= flags else 128
