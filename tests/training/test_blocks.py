"""Recomputed activations: the same numbers, less memory, and as much as `glass size` predicts."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.sizing import StepOptions, training_memory
from glassformer.training import read_run, train
from glassformer.training.blocks import SAVED, recompute_blocks
from tests.sizing.test_memory import live_peak, weigh
from tests.training import tiny

KINDS = ("full", "selective")
MODELS = {
    "dropout": ("model.dropout=0.2",),
    "experts": ("model.preset=moe_tiny", "model.n_heads=4", "model.dropout=0.1"),
    "seq2seq": ("model.preset=transformer_base", "model.n_encoder_layers=2"),
}


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if "loss" in event]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_without(tmp_path, model):
    small = [change for change in MODELS[model] if change != "model.d_ff=48"]
    found = {}
    for kind in ("no", *KINDS):
        changes = (*small, "machine.compile=no", f"machine.recompute={kind}", "loop.steps=4", "loop.log_every=1")
        drop = ("model.d_ff",) if model == "experts" else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "SMALL", tuple(c for c in tiny.SMALL if not c.startswith(drop or "?")))
            session = tiny.session(tmp_path, *changes, name=kind)
        train(session.run, session.data)
        found[kind] = losses(tmp_path / kind)
    assert len(found["no"]) >= 6
    for kind in KINDS:
        assert max(abs(a - b) for a, b in zip(found[kind], found["no"], strict=True)) <= 1e-7


class Count(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls["saved" if func in SAVED else "gelu" if "gelu" in str(func) else "other"] += 1
        return func(*args, **(kwargs or {}))


SIZES = {"n_layers": 4, "d_model": 64, "attention__n_heads": 4, "feedforward__d_ff": 256, "vocab_size": 97}


def model_and_step(kind: str, batch: int = 2):
    config = gf.presets.gpt2(**SIZES, max_len=64, dropout=0.0)
    model = gf.build(config, seed=0).train()
    recompute_blocks(model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.arange(batch * 64).view(batch, 64) % 97

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def test_selective_repeats_no_matmul_and_full_repeats_all():
    calls = {}
    for kind in ("no", *KINDS):
        _, step = model_and_step(kind)
        step()
        with Count() as count:
            step()
        calls[kind] = count.calls
    forward = 4 * 7  # per block: q, k, v, attention, o, up, down
    assert calls["selective"]["saved"] == calls["no"]["saved"]
    assert calls["full"]["saved"] == calls["no"]["saved"] + forward - 4  # the last matmul is not needed again
    assert calls["selective"]["gelu"] == calls["full"]["gelu"] == calls["no"]["gelu"] + 4


@torch.no_grad()
def test_nothing_is_recomputed_without_gradients():
    model, _ = model_and_step("full")
    tokens = torch.arange(8)[None]
    expected = model_and_step("no")[0](tokens)
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_falls_as_the_size_sheet_says(kind):
    _, plain = model_and_step("no", batch=24)
    model, step = model_and_step(kind, batch=24)
    plain(), step()
    without, measured = (3 * weigh(model) + live_peak(work) for work in (plain, step))
    predicted = training_memory(model.config, 24, 64, options=StepOptions(recompute=kind))
    assert predicted.peak == pytest.approx(measured, rel=0.05)
    assert measured <= (0.55 if kind == "full" else 0.8) * without
    assert predicted.peak < training_memory(model.config, 24, 64).peak


def test_a_run_says_what_it_recomputes(tmp_path):
    run = read_run("", ("machine.recompute=full", "loop.batch=24"))
    assert gf.size(run).training.peak < gf.size(read_run("", ("loop.batch=24",))).training.peak
    with pytest.raises(ConfigError, match="expected one of 'no', 'selective', 'full'"):
        read_run("", ("machine.recompute=sometimes",))
    with pytest.raises(ConfigError, match="cannot be combined"):
        read_run("", ("machine.recompute=full", "machine.products=float8", "machine.precision=bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_recompute_as_well(tmp_path, kind):
    found = {}
    for chosen in ("no", kind):
        changes = ("machine.compile=yes", f"machine.recompute={chosen}", "loop.steps=4", "loop.log_every=1")
        session = tiny.session(tmp_path, *changes, name=chosen)
        train(session.run, session.data)
        found[chosen] = losses(tmp_path / chosen)
    assert max(abs(a - b) for a, b in zip(found[kind], found["no"], strict=True)) <= 1e-5
