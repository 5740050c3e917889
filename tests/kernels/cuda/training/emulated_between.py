"""The kernels of between.cu, compiled for the CPU."""

import ctypes
import functools
import hashlib
from pathlib import Path

from glassformer.kernels.cuda.training import between
from glassformer.kernels.toolchain import nvrtc
from tests.emulated_cuda import built


@functools.cache
def library(text, name, root):
    folder = root / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    made = built(text, name, folder, Path(__file__).parent)
    assert made.size() == ctypes.sizeof(between.Arguments)
    return made


def emulate(monkeypatch, root):
    """Launch kernels on the CPU for the rest of a test."""

    class Emulated:
        def __init__(self, text, name):
            self.library = library(text, name, root)

        def launch(self, given, blocks, threads):
            self.library.run(ctypes.byref(given), blocks, threads)

    monkeypatch.setattr(nvrtc, "kernel", lambda text, name, device: Emulated(text, name))
