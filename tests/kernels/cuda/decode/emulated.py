"""A decoder whose launches happen on the CPU."""

import ctypes
from pathlib import Path

import torch

from glassformer.kernels.cuda.decode import decoder, library
from glassformer.model import DecoderLM
from tests.emulated_cuda import built

HERE = Path(__file__).parent
MACHINE = {
    "machine.cuh": (HERE / "emulated_machine.h").read_text(),
    "cluster.cuh": (HERE / "emulated_cluster.h").read_text(),
}


class Emulated(decoder.CudaDecoder):
    def __init__(
        self, model: DecoderLM, folder: Path, clusters: int = 2, dtype: torch.dtype = torch.float32, capacity: int = 64
    ):
        super().__init__(model, capacity, clusters, dtype)
        self.library = built(library.source(self.sizes, instead=MACHINE), "decode", folder, HERE)
        assert self.library.size() == ctypes.sizeof(library.Arguments)

    def _launch(self, count: int) -> None:
        self.library.run(ctypes.byref(self.arguments(count)), self.layout.blocks, 32 * (decoder.WARPS + 1))
