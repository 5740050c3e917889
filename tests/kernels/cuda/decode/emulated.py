"""A decoder whose launches happen on the CPU."""

import ctypes
from pathlib import Path

import pytest
import torch

from glassformer.kernels.cuda.decode import decoder
from glassformer.kernels.cuda.decode.pack import source
from glassformer.model import DecoderLM
from tests.emulated_cuda import built

HERE = Path(__file__).parent
MACHINE = {
    "machine.cuh": (HERE / "emulated_machine.h").read_text(),
    "cluster.cuh": (HERE / "emulated_cluster.h").read_text(),
}


class Emulated(decoder.CudaDecoder):
    def __init__(self, model: DecoderLM, clusters: int = 2, dtype: torch.dtype = torch.float32, capacity: int = 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "_clusters", lambda device: clusters)
            super().__init__(model, 1, capacity, dtype)
        self.library = built(source(self.sizes, decoder.PARTS, MACHINE), "decode", HERE)
        assert self.library.size() == ctypes.sizeof(decoder.Arguments)

    def _launch(self, count: int) -> None:
        self.library.run(ctypes.byref(self.arguments(count)), self.layout.blocks, 32 * (decoder.WARPS + 1))
