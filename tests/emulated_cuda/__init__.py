"""CUDA kernels compiled for the CPU: blocks are threads of the system, their threads fibers (cuda.h)."""

import atexit
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import pytest

from glassformer.generation import generate, loop
from glassformer.kernels.toolchain.cxx import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
HERE = Path(__file__).parent
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-pthread", "-fno-gnu-unique")
"""The last one: shared memory of one kernel is not that of another which was loaded before."""


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


def built(text: str, kernel: str, folder: Path, headers: Path, *others: str) -> ctypes.CDLL:
    """A library with `run(argument, blocks, threads)`, which launches a kernel of one argument.

    The argument is the struct `Arguments` that the text defines. Other kernels of the text are launched by `run_NAME`.
    """
    ways = way_in(kernel, "run") + "".join(way_in(other, f"run_{other}") for other in others)
    ways = f'static Arguments given;\n{ways}extern "C" int size() {{ return (int)sizeof(Arguments); }}\n'
    file, made = folder / f"{kernel}.cpp", folder / f"{kernel}.so"
    file.write_text(f'#include "cuda.h"\n{text}\n{ways}')
    command = [compiler(), *FLAGS, "-shared", "-Wl,-Bsymbolic"]
    command += [f"-I{precompiled()}", f"-I{HERE}", f"-I{headers}", str(file), "-o", str(made)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


def both_ways(monkeypatch, make_state):
    """Return a function that generates by the state that `make_state` returns, and by torch."""

    def call(model, *given, **changes):
        wanted = generate(model, *given, engine="torch", **changes)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "make_state", make_state)
            return generate(model, *given, **changes), wanted

    return call
