"""What a run uses of its machine, with the answers of a machine replaced."""

import dataclasses

import pytest
import torch

from glassformer.model import device as devices
from glassformer.training import accelerate
from glassformer.training.machine import choose_machine, is_capturable, kernel_request
from glassformer.training.run import read_run
from glassformer.training.sections import Start
from glassformer.training.tuning.section import Lora
from tests.training import tiny

GPU = torch.device("cuda")


@pytest.fixture
def _gpu(monkeypatch):
    """A GPU on which kernels can be launched."""
    kernels = pytest.importorskip("glassformer.kernels.training")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(devices, "choose_for_training", None)
    monkeypatch.setattr(
        "glassformer.training.machine.choose_for_training", lambda *_: devices.Choice("cuda", torch.bfloat16, "")
    )
    monkeypatch.setattr(kernels.nvrtc, "can_launch", lambda: True)
    monkeypatch.setattr(kernels.causal, "available", lambda: True)
    monkeypatch.setattr(kernels.fp8, "unsupported_device", lambda device: None)


def run(*changes):
    return read_run("", ("model.preset=gpt2", "model.dropout=0", *changes))


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        ((), False),
        (("machine.compile=yes",), True),
        (("machine.compile=no",), False),
        (("machine.products=float8", "machine.precision=bfloat16"), True),
        (("loop.accumulate=2", "loop.batch=4"), True),
        (("machine.recompute=full",), True),
        (("model.dropout=0.1",), True),
        (("model.placement=parallel",), True),
        (('optim.freeze=["embed"]',), True),
    ],
)
def test_a_step_is_compiled_unless_kernels_carry_it(changes, compiled):
    device, dtype, found = choose_machine(run(*changes))
    assert (device.type, dtype, found) == ("cuda", torch.bfloat16, compiled)
    request = kernel_request(run(*changes), device, dtype, found)
    names = accelerate.choose(run(*changes).model, **request)
    if "machine.compile=no" not in changes:
        assert ("fused blocks" in names) == (not compiled)


@pytest.mark.usefixtures("_gpu")
def test_several_processes_and_adapters_compile():
    assert choose_machine(run(), alone=False)[2]
    assert not is_capturable(run(), GPU, alone=False)
    assert not is_capturable(run(), torch.device("cpu"), alone=True)
    lora = dataclasses.replace(run(), lora=Lora(), start=Start(model="any"))
    assert choose_machine(lora)[2]


def test_cuda_asked_for_and_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = tiny.session(tmp_path, "machine.device=cuda").run
    with pytest.raises(ValueError, match="no CUDA device is here"):
        choose_machine(given)
