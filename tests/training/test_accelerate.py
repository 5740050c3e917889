"""What a run uses of its machine, with the answers of a machine replaced; training without the kernels."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from glassformer import config as c
from glassformer.config import ConfigError
from glassformer.model import build
from glassformer.model import device as devices
from glassformer.training import accelerate
from glassformer.training.loop import evaluate, prepare_state, train_step
from glassformer.training.run import read_run
from glassformer.training.sections import Start
from glassformer.training.tuning.section import Lora
from tests import variants
from tests.training import tiny
from tests.training.test_loop import batches

GPU = torch.device("cuda")


@pytest.fixture
def _gpu(monkeypatch):
    """A GPU on which kernels can be launched."""
    kernels = pytest.importorskip("glassformer.kernels.training")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(devices, "choose_for_training", None)
    monkeypatch.setattr(
        "glassformer.training.accelerate.choose_for_training", lambda *_: devices.Choice("cuda", torch.bfloat16, "")
    )
    monkeypatch.setattr(kernels.nvrtc, "can_launch", lambda: True)
    monkeypatch.setattr(kernels.causal, "available", lambda: True)
    monkeypatch.setattr(kernels.trial, "is_successful", lambda config, device: True)
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
    device, dtype, found = accelerate.choose_machine(run(*changes))
    assert (device.type, dtype, found) == ("cuda", torch.bfloat16, compiled)
    request = accelerate.kernel_request(run(*changes), device, dtype, found)
    names = accelerate.choose(run(*changes).model, **request)
    if "machine.compile=no" not in changes:
        assert ("fused blocks" in names) == (not compiled)


@pytest.mark.usefixtures("_gpu")
def test_a_step_is_compiled_if_the_trial_of_the_kernels_failed(monkeypatch):
    kernels = pytest.importorskip("glassformer.kernels.training")
    monkeypatch.setattr(kernels.trial, "is_successful", lambda config, device: False)
    assert accelerate.choose_machine(run())[2]


@pytest.mark.usefixtures("_gpu")
def test_several_processes_and_adapters_compile():
    assert accelerate.choose_machine(run(), alone=False)[2]
    assert not accelerate.is_capturable(run(), GPU, alone=False)
    assert not accelerate.is_capturable(run(), torch.device("cpu"), alone=True)
    lora = dataclasses.replace(run(), lora=Lora(), start=Start(model="any"))
    assert accelerate.choose_machine(lora)[2]


def test_cuda_asked_for_and_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = tiny.session(tmp_path, "machine.device=cuda").run
    with pytest.raises(ValueError, match="no CUDA device is here"):
        accelerate.choose_machine(given)


def test_rotary_tables_are_filled_before_a_step_is_compiled():
    """A table that the first step computes would make torch.compile compile everything twice."""
    kinds = (c.LayerKind((1,), position=c.Rotary(base=100.0)),)
    model = build(variants.decoder(position=c.Rotary(), layer_kinds=kinds, max_len=2000))
    accelerate.fill_tables(model, 1500, torch.device("cpu"))
    schemes = [model.decoder.position, *model.decoder.kinds.others]
    held = [dict(scheme.tables) for scheme in schemes]
    assert all(len(tables) == 2 for tables in held)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)(torch.zeros(1, 1500, dtype=torch.long))
    for before, scheme in zip(held, schemes, strict=True):
        assert all(scheme.tables[key] is table for key, table in before.items())
        assert scheme.tables.keys() == before.keys()


def test_training_imports_kernels_in_one_place():
    from tests.test_architecture import FILES, imports_of, room_of

    users = [
        path.name
        for path in FILES
        if room_of(path) == "training" and any(name.startswith("glassformer.kernels") for name in imports_of(path))
    ]
    assert users == ["accelerate.py"]


BLOCKED = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "glassformer.kernels" or name.startswith("glassformer.kernels."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from glassformer.training import accelerate, chunked_loss, forecast, muon, objective, optimizers, run
assert accelerate.kernels is None
assert not any(name.startswith("glassformer.kernels") for name in sys.modules)
"""


@pytest.mark.slow  # tests/test_without_kernels.py imports every module in a copy without the package
def test_without_the_package_training_still_imports():
    subprocess.run([sys.executable, "-c", BLOCKED], check=True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_the_package_training_runs(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "kernels", None)
    monkeypatch.setattr("glassformer.training.objective.CHUNKED_FROM", 2)
    session = tiny.session(tmp_path, f"optim.kind={kind}", "loop.steps=4")
    state = prepare_state(session.run)
    assert state.kernels == []
    losses = [train_step(state, batch)["loss"] for batch in batches(session, 4)]
    assert losses[-1] < losses[0]
    assert torch.isfinite(torch.tensor(evaluate(state, session.data.validation(session.run))))


def test_without_the_package_float8_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "kernels", None)
    float8 = ("machine.products=float8", "machine.precision=bfloat16", "machine.device=auto", "model.d_model=48")
    run = tiny.session(tmp_path, *float8).run
    with pytest.raises(ConfigError, match=r"needs glassformer\.kernels.*: use machine\.products='precision'\.$"):
        prepare_state(run)
    assert accelerate.choose(run.model, device=torch.device("cpu")) == []


@pytest.mark.slow
def test_another_missing_module_is_not_hidden():
    condition = 'name == "glassformer.kernels" or name.startswith("glassformer.kernels.")'
    code = BLOCKED.replace(condition, 'name == "glassformer.shapes"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "No module named 'glassformer.shapes'" in done.stderr
