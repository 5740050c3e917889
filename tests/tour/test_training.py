"""The training part of the tour: its settings, corpus and sanity checks."""

import dataclasses
import math

import pytest

from glassformer.config import ConfigError
from glassformer.finding import Verdict
from glassformer.tour import terminal
from glassformer.tour import training as tour_training
from glassformer.tour.generation import sample_prompt
from glassformer.tour.training import Corpus, Plan, TrainingRecord
from glassformer.training.data import corpus
from glassformer.training.data.corpus import DataError
from tests.tour.tiny import POEM, SMALL, tiny_plan


def test_the_bigram_baseline_is_checked_only_after_enough_training():
    text = Corpus("text", "", 100, 10, 65, "", {"uniform": 4.2, "bigram": 2.5})
    record = TrainingRecord(final=9.0)
    assert tour_training.beats_bigram(Plan(0.5), text, record).verdict is Verdict.SKIP
    assert tour_training.beats_bigram(Plan(2.0), text, record).verdict is Verdict.FAIL
    assert tour_training.beats_bigram(Plan(2.0), text, TrainingRecord(final=0.1)).passed


def test_a_wrong_initialisation_and_a_loss_that_does_not_fall_fail(tmp_path):
    session, _ = tour_training.open_corpus(tiny_plan(tmp_path))
    assert tour_training.initial_loss(session).passed
    wide = dataclasses.replace(session.run.model, init_std=0.5)
    loud = dataclasses.replace(session, run=dataclasses.replace(session.run, model=wide))
    assert not tour_training.initial_loss(loud).passed
    assert not tour_training.overfit_one_batch(session, max_steps=2).passed


def test_without_shakespeare_another_text_is_used_and_reported(tmp_path, monkeypatch):
    def nowhere():
        raise DataError("tiny Shakespeare is not on this machine and cannot be downloaded (no network).")

    monkeypatch.setattr(corpus, "shakespeare", nowhere)
    monkeypatch.setattr(corpus, "embedded", lambda: POEM)
    session, text = tour_training.open_corpus(Plan(out=tmp_path, changes=(*SMALL, f"data.cache={tmp_path / 'tokens'}")))
    assert text.name == "embedded"
    assert "not on this machine" in text.note
    assert "manual that comes with Python" in text.note
    assert "not on this machine" in terminal.corpus_text(text)
    assert session.data.tokenizer.encode(sample_prompt(session)).size


def test_force_replaces_the_model_of_an_earlier_tour_and_no_other_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tour_training, "fit_steps", lambda session, minutes: session.run)
    plan = tiny_plan(tmp_path, force=True)
    plan = dataclasses.replace(plan, changes=(*plan.changes, "loop.steps=2", "loop.eval_every=2"))
    trained = plan.out / "trained"
    trained.mkdir(parents=True)
    for name in ("log.jsonl", "run.toml", "notes.txt"):
        (trained / name).write_text("mine")
    session, text = tour_training.open_corpus(plan)
    tour_training.train_model(plan, session, text, lambda event: None)
    assert (trained / "notes.txt").read_text() == "mine"
    assert "mine" not in (trained / "log.jsonl").read_text()
    assert (trained / "best" / "model.safetensors").exists()


def test_a_corpus_that_the_user_chose_is_not_replaced(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        tour_training.open_corpus(Plan(out=tmp_path, changes=("data.corpus=nowhere.txt",)))
    with pytest.raises(ConfigError, match="colour"):
        tour_training.open_corpus(Plan(out=tmp_path, changes=("loop.colour=1",)))


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf])
def test_minutes_must_be_positive_and_finite(minutes):
    with pytest.raises(ValueError, match="positive"):
        Plan(minutes)


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Plan(out=tmp_path / "file")
