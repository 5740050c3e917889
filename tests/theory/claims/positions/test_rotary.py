"""Rotary scores: the formula, the sign, a broken engine."""

import numpy as np
import pytest

from glassformer.model import attention
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.positions import rotary


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
def test_complex_numbers_say_what_rotation_matrices_say(pairing):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, rotary.K))
    m, n = 5, 9
    score = 0.0
    for i in range(rotary.K // 2):
        at = [2 * i, 2 * i + 1] if pairing == "interleaved" else [i, i + rotary.K // 2]
        theta = 10000.0 ** (-2 * i / rotary.K)
        cos, sin = np.cos((n - m) * theta), np.sin((n - m) * theta)
        score += q[at] @ np.array([[cos, -sin], [sin, cos]]) @ k[at]
    assert rotary.by_offset(q, k, pairing)[m, n] == pytest.approx(score)


def test_the_printed_sign_is_kept_apart_in_both_pairings():
    found = {p.id: p for p in rotary.rope_relative(Lab())}
    for pairing in ("interleaved", "halves"):
        assert found[f"{pairing}: differs from q^T R_(m-n) k"].measured > 1
        assert found[f"{pairing}: equals q^T R_(n-m) k"].measured < 1e-12


def test_an_engine_that_rotates_the_other_way_fails(monkeypatch):
    whole = attention.apply_rotation
    monkeypatch.setattr(attention, "apply_rotation", lambda x, rotation: whole(x, rotation._replace(sin=-rotation.sin)))
    found = {p.id: p for p in rotary.rope_relative(Lab())}
    assert found["halves: Toeplitz"].passed  # the conclusion holds for either handedness
    assert not found["halves: equals q^T R_(n-m) k"].passed
