"""Training without the package `glassformer.kernels`: everything works in plain torch."""

import subprocess
import sys

import pytest
import torch

from glassformer import config as c
from glassformer.config import ConfigError
from glassformer.model import build
from glassformer.training import accelerate
from glassformer.training.loop import evaluate, prepare_state, train_step
from tests import variants
from tests.training import tiny
from tests.training.test_loop import batches


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
