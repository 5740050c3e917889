"""Greedy against best."""

import sys

import numpy as np
import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.probability import decoding
from glassformer.theory.claims.registry import find


def test_the_absent_exercise_has_its_erratum_here():
    absent = next(e for e in find("greedy-vs-best").errata if e.id == "E22")
    assert absent.sources == ("Bishop 12.14",)
    assert absent.flaw == "absent"


def test_greedy_and_best_by_hand():
    p = decoding.table(decoding.SMALLEST)
    assert decoding.greedy(p) == (1, 0)
    assert decoding.best(p) == (0, 0)
    assert decoding.misses(p)
    assert not any(decoding.ties(p).values())
    assert not decoding.misses(decoding.independent_of(p))


def test_of_the_repairs_one_works():
    assert [name for name, p in decoding.repairs().items() if decoding.misses(p)] == ["0.1 -> 0.35, y1 on rows"]
    assert all(sum(map(sum, p)) == 1 for p in decoding.repairs().values())


def test_the_model_computes_its_table():
    p = np.array([[0.1, 0.2, 0.05], [0.15, 0.0, 0.2], [0.1, 0.1, 0.1]])
    model = decoding.model_of(p)
    for first in range(3):
        for second in range(3):
            steps = model(torch.tensor([[3, first, second]])).detach().log_softmax(-1)[0]
            joint = float((steps[0, first] + steps[1, second]).exp())
            assert joint == pytest.approx(p[first, second], abs=1e-14)


def test_greedy_decoding_instead_of_beams_fails(monkeypatch):
    whole = decoding.generate
    monkeypatch.setattr(decoding, "generate", lambda *args, beams=1, **rest: whole(*args, **rest))
    assert [p.id for p in decoding._engine(Lab()) if not p.passed] == ["our beams of width V = best on the table"]


def test_without_z3_a_part_is_skipped_and_the_control_still_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "z3", None)
    bounds = list(decoding._bounds(Lab()))
    assert len(bounds) == 5
    assert all(p.verdict == "skip" and "z3" in p.why for p in bounds)
    assert not all(p.passed for p in decoding._enumerated(Lab(broken=True)))
