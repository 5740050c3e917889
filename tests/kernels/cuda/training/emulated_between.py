"""The kernels of between.cu, compiled for the CPU."""

import ctypes
from pathlib import Path

from glassformer.kernels.cuda.training import between
from glassformer.kernels.toolchain import nvrtc
from tests.emulated_cuda import built


def emulate(monkeypatch):
    """Launch kernels on the CPU for the rest of a test."""

    class Emulated:
        def __init__(self, text, name):
            self.library = built(text, name, Path(__file__).parent)
            assert self.library.size() == ctypes.sizeof(between.Arguments)

        def launch(self, given, blocks, threads):
            self.library.run(ctypes.byref(given), blocks, threads)

    monkeypatch.setattr(nvrtc, "kernel", lambda text, name, device: Emulated(text, name))
