"""A decoder whose launches happen on the CPU."""

import ctypes
from pathlib import Path

import torch

from glassformer.generate.cuda import decoder, library
from glassformer.model import DecoderLM
from tests.emulated_cuda import built

HERE = Path(__file__).parent


class Emulated(decoder.CudaDecoder):
    def __init__(
        self, model: DecoderLM, folder: Path, programs: int = 3, dtype: torch.dtype = torch.float32, capacity: int = 64
    ):
        super().__init__(model, capacity, programs, dtype)
        text = library.source(self.sizes, machine=(HERE / "emulated_machine.h").read_text())
        self.library = built(text, "decode", folder, HERE)
        assert self.library.size() == ctypes.sizeof(library.Given)

    def _launch(self, count: int) -> None:
        self.counter.zero_()
        self.library.run(ctypes.byref(self.arguments(count)), self.programs, 32 * decoder.WARPS)
