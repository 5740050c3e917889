"""Devices by name, and the doctor on another device than the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.doctor.subject.device import device_name, find_device, moved
from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.measure import same_shape_bound

ROOT = Path(__file__).parents[3]


def test_the_cpu_is_always_there():
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("wanted", "devices", "sentence"),
    [
        ("gpu", 0, "device 'gpu' is not known: use cpu, cuda, cuda:1 or mps."),
        ("cuda:x", 0, "device 'cuda:x' is not known: use cpu, cuda, cuda:1 or mps."),
        ("meta", 0, "device 'meta' holds no numbers to examine: use cpu, cuda, cuda:1 or mps."),
        ("cuda", 0, "device 'cuda' was requested, but torch finds no cuda device on this machine: use cpu."),
        (
            "cuda:2",
            2,
            "device 'cuda:2' was requested, but the last cuda device of this machine is cuda:1: use cuda:1 or cpu.",
        ),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_sentence(monkeypatch, wanted, devices, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(CannotExamineError) as error:
        find_device(wanted)
    assert str(error.value) == sentence


def test_a_name_without_a_number_is_the_first_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda") == torch.device("cuda:0")
    assert find_device("cuda:1") == torch.device("cuda:1")


def test_a_model_that_is_there_already_is_not_copied():
    model = nn.Linear(2, 2)
    assert moved(model, torch.device("cpu")) is model
    assert moved(len, torch.device("cpu")) is len


def test_a_model_is_copied_to_the_device_and_the_original_stays():
    model = nn.Linear(2, 2)
    twin = moved(model, torch.device("meta"))
    assert twin.weight.device.type == "meta"
    assert model.weight.device.type == "cpu"


def test_a_model_that_cannot_be_copied_cannot_be_moved():
    class Own(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("no")

    with pytest.raises(CannotExamineError, match=r"Own cannot be copied \(TypeError\).* model.to\('meta'\)"):
        moved(Own(2, 2), torch.device("meta"))


def test_the_bound_of_equal_calls_follows_the_dtype_on_devices_that_reorder_sums():
    class Elsewhere:
        type = "cuda"

    logits = torch.ones(2, 3)
    assert same_shape_bound(logits) == pytest.approx(1e-7)

    class Away(torch.Tensor):
        device = Elsewhere()

    assert same_shape_bound(logits.as_subclass(Away)) == pytest.approx(8 * 2**-23)
    assert same_shape_bound(logits.bfloat16().as_subclass(Away)) == pytest.approx(8 * 2**-7)
    assert same_shape_bound(logits.double().as_subclass(Away)) == pytest.approx(1e-7)


def test_the_report_says_where_the_model_was_examined():
    model = gf.build(gf.presets.nano(n_layers=1, d_model=16, n_heads=2, vocab_size=31, max_len=16), seed=0)
    report = gf.diagnose(model, quick=True, device="cpu")
    assert report.healthy
    assert report.to_dict()["device"] == "cpu"
    with pytest.raises(CannotExamineError, match="'nowhere' is not known"):
        gf.diagnose(model, device="nowhere")


def simulated(*arguments: str) -> list[dict]:
    """What the doctor finds on a simulated device, in a process of its own: a device type is registered for good."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.doctor.simulated_device", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_probes_and_comparison_move_what_they_compute_with():
    (found,) = simulated("decoder", "--quick")
    assert found["unlike"] == []
    assert found["compare"]["verdict"] == "same"
    assert [f["verdict"] for f in found["compare"]["findings"]] == ["pass"] * 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "rotary", "encoder", "seq2seq"])
def test_every_probe_moves_what_it_computes_with(kind):
    (found,) = simulated(kind)
    assert found["unlike"] == []
    assert found["compare"]["verdict"] == "same"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_the_doctor_on_a_gpu():
    model = gf.build(gf.presets.nano(n_layers=2, d_model=32, n_heads=2, vocab_size=31, max_len=64), seed=0)
    report = gf.diagnose(model, device="cuda")
    assert report.healthy
    assert report.device == "cuda:0"
    assert gf.compare(model, model, devices=("cpu", "cuda")).same
