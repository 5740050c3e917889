"""Which training kernels are chosen, and that one function installs them."""

import ast
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.kernels import training
from glassformer.kernels.training import (
    ALLOWED,
    TRAINING_KERNELS,
    TrainingRequest,
    choose_training_kernels,
    install_training_kernels,
)
from glassformer.model import build

ROOT = Path(__file__).parents[2]
GPT2 = gf.presets.gpt2(n_layers=1, dropout=0.0)
CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture
def h200(monkeypatch):
    """A machine with a Hopper GPU and NVRTC, as far as the choice of kernels can see."""
    monkeypatch.setattr(training.causal, "available", lambda: True)
    monkeypatch.setattr(training.nvrtc, "can_launch", lambda: True)
    monkeypatch.setattr(training.trial, "is_successful", lambda config, device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_every_entry_is_complete():
    names = [kernel.name for kernel in TRAINING_KERNELS]
    assert len(set(names)) == len(names)
    assert set(names) == ALLOWED.keys()
    for kernel in TRAINING_KERNELS:
        assert kernel.replaces
        assert kernel.accuracy
        assert (ROOT / kernel.test).exists(), kernel.test


def test_only_one_place_changes_the_class_of_a_module():
    places = []
    for path in (ROOT / "src" / "glassformer").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "__class__" in text else ():
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Attribute) and t.attr == "__class__" for t in targets):
                places.append(path.relative_to(ROOT / "src" / "glassformer").as_posix())
    assert [p for p in places if not p.startswith("theory/")] == ["kernels/replacement.py"]


@pytest.mark.usefixtures("h200")
def test_what_a_gpu_uses():
    bf16 = TrainingRequest(GPU, torch.bfloat16, compiled=True, muon=True)
    assert choose_training_kernels(GPT2, bf16) == [
        "causal attention",
        "CUDA loss",
        "CUDA Muon",
        "CUDA AdamW",
    ]
    eager = TrainingRequest(GPU, torch.bfloat16)
    assert choose_training_kernels(GPT2, eager) == ["CUDA loss", "CUDA AdamW"]
    sharded = TrainingRequest(GPU, torch.bfloat16, compiled=True, sharded=True, muon=True)
    assert choose_training_kernels(GPT2, sharded) == ["CUDA loss"]
    float8 = TrainingRequest(GPU, torch.bfloat16, compiled=True, float8=True)
    eight = ["float8 feed-forward", "float8 projections", "float8 head"]
    assert choose_training_kernels(GPT2, float8) == [*eight, "causal attention", "CUDA AdamW"]


@pytest.mark.usefixtures("h200")
def test_a_module_is_replaced_once_and_kernels_without_a_module_are_not_reported():
    model = build(gf.presets.gpt2(n_layers=1, d_model=64, n_heads=1, dropout=0.0, vocab_size=65))
    names = list(model.state_dict())
    float8 = TrainingRequest(GPU, torch.bfloat16, compiled=True, float8=True)
    installed = install_training_kernels(model, float8)
    assert installed == ["float8 feed-forward", "float8 projections", "float8 head", "causal attention", "CUDA AdamW"]
    attention = model.blocks[0].attention
    assert type(attention).__name__ == "Float8Attention"
    assert attention.kernel is training.causal.attend
    assert list(model.state_dict()) == names


def test_which_kernels_support_frozen_parameters(monkeypatch):
    """The others compute the gradient of every matrix, and know no adapters."""
    monkeypatch.setattr(training.cxx, "register_bits", lambda: 512)
    monkeypatch.setattr(training.cxx, "is_intel", lambda: False)
    monkeypatch.setattr(training.cxx, "compiler", lambda: "c++")
    nano, frozen = gf.presets.nano(), TrainingRequest(CPU, frozen=True)
    assert choose_training_kernels(nano, TrainingRequest(CPU)) == ["native attention", "native feed-forward"]
    assert choose_training_kernels(nano, frozen) == ["frozen matmuls", "native attention"]


def test_float8_without_a_gpu_is_refused_with_the_remedy():
    request = TrainingRequest(CPU, float8=True)
    with pytest.raises(ConfigError, match=r"this run is on the cpu: use machine\.products='precision'\."):
        install_training_kernels(build(gf.presets.nano()), request)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"native": False}, "machine.compile is not 'auto'"),
        ({"sharded": True}, "parameters are sharded"),
        ({"device": GPU}, "the device is cuda, not cpu"),
    ],
)
def test_a_refusal_has_a_reason(change, reason, monkeypatch):
    monkeypatch.setattr(training.cxx, "register_bits", lambda: 512)
    monkeypatch.setattr(training.cxx, "is_intel", lambda: False)
    request = TrainingRequest(**({"device": CPU} | change))
    natives = [kernel for kernel in TRAINING_KERNELS if kernel.name.startswith("native")]
    config = gf.presets.nano(d_model=32, n_heads=2, d_ff=64)
    assert [kernel.supports(config, request) for kernel in natives] == [reason] * 2
