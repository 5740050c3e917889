"""`gf.train` returns what it trained."""

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError, to_toml
from glassformer.training import read_run
from glassformer.training.api import Overrides, TrainResult, train
from glassformer.training.checkpoint import CheckpointError
from glassformer.training.run import Run, run_to_dict
from glassformer.training.sections import Loop
from tests.pages.hostile import HOSTILE, VISIBLE, assert_static_svg
from tests.training import tiny

CONFIG = gf.presets.nano(n_layers=1, d_model=16, n_heads=2, d_ff=32, vocab_size=61, max_len=16)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_file(folder: Path, *changes: str) -> Path:
    path = folder / "run.toml"
    path.write_text(to_toml(run_to_dict(tiny.session(folder, *changes).run)))
    return path


def test_overrides_name_the_parts_of_a_run():
    parts = {field.name for field in dataclasses.fields(Run)}
    assert set(Overrides.__annotations__) == parts - {"start"}  # an argument of its own, which takes a model too


def test_train_returns_the_last_model_with_its_tokenizer_and_events(tmp_path):
    heard = []
    result = train(run_file(tmp_path), listen=heard.append, loop={"steps": 6}, schedule={"warmup": 1}, seed=4)
    assert heard == result.history
    assert result.folder == tmp_path / "run"
    lines = [json.loads(line) for line in (result.folder / "log.jsonl").read_text().splitlines()]
    assert lines == result.history
    assert [event["step"] for event in lines if event["event"] == "validation"] == [0, 5, 6]
    last = gf.load(result.folder / "last").state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in result.model.state_dict().items())
    assert not result.model.training
    assert result.tokenizer.decode(result.tokenizer.encode("the cat").ids) == "the cat"
    assert "seed = 4" in (result.folder / "run.toml").read_text()
    assert gf.generate(result.model, "the", max_new_tokens=2).texts[0].startswith("the")
    with pytest.raises(CheckpointError, match="already holds a run"):
        train(tmp_path / "run.toml")


def test_a_run_and_its_file_and_its_overrides_train_the_same(tmp_path):
    path = run_file(tmp_path, "loop.steps=3", "schedule.warmup=1")
    run = read_run(path.read_text())
    results = [
        train(path, out=tmp_path / "a"),
        train(run, out=str(tmp_path / "b")),
        train(dataclasses.replace(run, loop=Loop(steps=500)), loop=run.loop, out=str(tmp_path / "c")),
    ]
    losses = [[e["loss"] for e in r.history if e["event"] == "validation"] for r in results]
    assert losses[0] == losses[1] == losses[2]


def test_a_text_is_trained_on_with_the_default_settings(tmp_path):
    corpus = tiny.corpus(tmp_path)
    small = read_run("", tiny.SMALL)
    result = train(
        corpus, model=small.model, loop=small.loop, machine=small.machine, data={"cache": str(tmp_path / "t")}
    )
    assert [event["text"] for event in result.history if event["event"] == "note"]  # the warm-up was shortened
    assert result.folder == Path("runs/corpus-1")
    assert result.model.config.n_layers == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lop": {"steps": 5}}, "lop is not a part of a run. Did you mean loop"),
        ({"loop": {"step": 5}}, "loop.step is not a field. Did you mean steps"),
        ({"loop": 5}, "loop must be a table"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
    ],
)
def test_wrong_overrides_are_one_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words):
        train(Run(CONFIG), **overrides)


def test_a_missing_run_file_is_one_sentence():
    with pytest.raises(ConfigError, match=r"nothing.toml does not exist: give a run file"):
        train("nothing.toml")


def test_the_display_in_a_notebook_has_the_losses_and_the_baselines():
    events = [{"event": "start", "uniform": 4.2, "baselines": {HOSTILE: 2.5}}]
    events += [{"event": "step", "step": i, "loss": 4.2 - i / 2000 + i % 3} for i in range(1, 3001)]
    events += [{"event": "validation", "step": 3000, "loss": 2.7}, {"event": "note", "text": HOSTILE}]
    shown = TrainResult(None, None, events, Path())._repr_svg_()
    assert_static_svg(shown)
    assert len(shown) < 200_000
    text = "".join(ElementTree.fromstring(shown).itertext())
    assert all(word in text for word in ("training", "validation", "uniform: 4.200", VISIBLE[:20]))
    assert TrainResult(None, None, events[:1], Path())._repr_svg_() is None
