"""CUDA kernels compiled for the CPU: blocks are threads of the system, their threads fibers (cuda.h)."""

import atexit
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from glassformer.files import cache_folder
from glassformer.generation import generate, loop
from glassformer.kernels.toolchain.cxx import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
HERE = Path(__file__).parent
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-pthread", "-fno-gnu-unique")
"""The last one: shared memory of one kernel is not that of another which was loaded before."""
KEPT = 30 * 24 * 3600
"""Seconds for which a library is kept that no test has loaded."""


@functools.cache
def precompiled() -> str:
    """A folder with cuda.h as GCC stores it: its standard headers take longer than a kernel. Clang reads cuda.h."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    made = Path(folder.name, "cuda.h.gch")
    command = [compiler(), *FLAGS, "-w", "-x", "c++-header", str(HERE / "cuda.h"), "-o", str(made)]
    subprocess.run(command, check=True)
    return folder.name


def way_in(kernel: str, run: str) -> str:
    return f"""
static void fiber_of_{kernel}() {{
    {kernel}(given);
    (*fibers)[threadIdx.x].done = true;
    give_way();
}}
extern "C" void {run}(const Arguments* a, int blocks, int threads) {{
    given = *a;
    launch(fiber_of_{kernel}, blocks, threads);
}}
"""


@functools.cache
def built(text: str, kernel: str, headers: Path, *others: str) -> ctypes.CDLL:
    """A library with `run(argument, blocks, threads)`, which launches a kernel of one argument.

    The argument is the struct `Arguments` that the text defines. Other kernels of the text are launched by `run_NAME`.
    A text is compiled once, also for later runs of the tests: compiling took half of the time of these tests.
    """
    ways = way_in(kernel, "run") + "".join(way_in(other, f"run_{other}") for other in others)
    ways = f'static Arguments given;\n{ways}extern "C" int size() {{ return (int)sizeof(Arguments); }}\n'
    return ctypes.CDLL(str(compiled(f'#include "cuda.h"\n{text}\n{ways}', kernel, headers)))


def compiled(text: str, name: str, headers: Path) -> Path:
    """The library of a source, in the cache folder under a hash of all that it is made from."""
    command = [str(compiler()), *FLAGS, "-shared", "-Wl,-Bsymbolic"]
    included = (file.read_text() for folder in (HERE, headers) for file in sorted(folder.glob("*.h")))
    digest = hashlib.sha256("\0".join((*command, text, *included)).encode()).hexdigest()[:24]
    made = cache_folder() / "emulated" / f"{name}-{digest}.so"
    if made.exists():
        os.utime(made)
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    for old in made.parent.glob("*.so"):
        if old.stat().st_mtime < time.time() - KEPT:
            old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
        source, out = Path(temporary, f"{name}.cpp"), Path(temporary, made.name)
        source.write_text(text)
        command += [f"-I{precompiled()}", f"-I{HERE}", f"-I{headers}", str(source), "-o", str(out)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        os.replace(out, made)
    return made


def both_ways(monkeypatch, make_state):
    """Return a function that generates by the state that `make_state` returns, and by torch."""

    def call(model, *given, **changes):
        wanted = generate(model, *given, engine="torch", **changes)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "make_state", make_state)
            return generate(model, *given, **changes), wanted

    return call
