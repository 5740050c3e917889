"""Training claims are slow; what they are made of is not."""

import math

import pytest
import torch

from glassformer.model import build, context
from glassformer.model.positions import Learned
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.positions import extrapolation as beyond
from glassformer.theory.claims.registry import check, find
from glassformer.training.run import Schedule


def test_without_slow_the_claim_is_skipped():
    assert check("pe-extrapolation", slow=False).verdict == "skip"


def test_the_recorded_run_is_within_the_bands_and_the_erratum_fails():
    for task in ("markov", "copy"):
        numbers = {s: dict(zip(beyond.LENGTHS, losses, strict=True)) for s, losses in beyond.RECORDED[task].items()}
        assert numbers.keys() == beyond.SCHEMES.keys()
        assert all(part.passed for part in beyond._bands(Lab(), task, numbers))
    assert all(e.examine().passed for e in find("pe-extrapolation").errata)


def test_bands_fail_when_rotary_keeps_its_loss():
    flat = dict.fromkeys(beyond.LENGTHS, 1.0)
    parts = list(beyond._bands(Lab(), "markov", dict.fromkeys(beyond.SCHEMES, flat)))
    assert {p.id[:3] for p in parts if not p.passed} == {"(a)", "(c)", "(d)"}


def test_a_fresh_model_is_as_good_as_guessing_and_only_unseen_positions_count():
    model = build(beyond.model_config("rotary", 24))
    with torch.no_grad():
        model.head.weight.zero_()
    for length in (32, 36, 96):
        assert beyond.loss_at(model, "copy", length, seed=0) == pytest.approx(math.log(24), abs=1e-5)


def test_training_repeats_itself_and_leaves_rows_it_never_saw(monkeypatch):
    monkeypatch.setattr(beyond, "STEPS", {"copy": 10})
    monkeypatch.setattr(beyond, "Schedule", lambda **_: Schedule(warmup=0))
    monkeypatch.setattr(beyond, "LENGTHS", (32, 36))
    first, again = (beyond.measure.__wrapped__("copy", "learned", 3) for _ in range(2))
    assert first == again
    assert first.untouched
    fresh = build(beyond.model_config("learned", 24), seed=3)
    assert first.losses[32] < beyond.loss_at(fresh, "copy", 32, 3)


def test_an_engine_that_clamps_positions_is_found_out(monkeypatch):
    whole = Learned.vectors
    monkeypatch.setattr(context, "_check_positions", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(Learned, "vectors", lambda self, places: whole(self, places.clamp(max=31)))
    assert not beyond._table_ends(Lab()).passed


@pytest.mark.slow
def test_the_runs_themselves_and_their_control():
    assert check("pe-extrapolation").passed
    assert check("pe-extrapolation", broken=True).verdict == "fail"
