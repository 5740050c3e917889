"""Captured steps whose kernels run on the CPU."""

import ctypes
from pathlib import Path

import pytest
import torch

from glassformer.kernels.cuda.graph import attend, launches, program, steps
from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.kernels.cuda.graph.program import Program
from tests.emulated_cuda import built

HERE = Path(__file__).parent
MACHINE = {"machine.cuh": (HERE / "emulated_machine.h").read_text()}
PROCESSORS = 3


@pytest.fixture
def on_cpu(monkeypatch):
    """Kernels are compiled for the CPU."""

    def run(self: Launch) -> None:
        library = built(self.text(MACHINE), self.kernel, HERE)
        assert library.size() == ctypes.sizeof(launches.ARGUMENTS[self.file])
        library.run(ctypes.byref(self.arguments()), self.blocks, 32 * launches.WARPS)

    def run_program(self: Program, count: int) -> None:
        self.counter.zero_()
        library = built(self.text(MACHINE), "step", HERE)
        assert library.size() == ctypes.sizeof(launches.ARGUMENTS["step"])
        library.run(ctypes.byref(self.arguments(count)), self.blocks, self.threads)

    monkeypatch.setattr(Program, "run", run_program)
    monkeypatch.setattr(program, "FEWEST_BYTES", 0)
    monkeypatch.setattr(launches, "WARPS", 2)
    monkeypatch.setattr(attend, "SPLITS", (4, 2))
    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(steps, "unsupported_device", lambda device: None)
    monkeypatch.setattr(steps, "_processors", lambda device: PROCESSORS)
    steps._LAST.clear()


def continued(model, tokens: torch.Tensor, new: list[torch.Tensor], precision: str, slots: int = 32) -> torch.Tensor:
    """Logits after each of the new tokens (steps, B, V), by captured steps after the prompt."""
    batch, _length = tokens.shape
    cache = model.new_cache("static", capacity=slots)
    with torch.no_grad():
        model(tokens, cache=cache)
    made = steps.captured_steps(model, cache, batch, slots, precision)
    return torch.stack([made.step(ids) for ids in new])
