"""Rank collapse, its rate and its depth."""

import functools
import math

from glassformer.lens import rank
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.theory import collapse


def test_rates_of_norm_and_variance_differ_by_two():
    parts = {p.id: p for p in collapse.rank_collapse_rate(Lab())}
    norm, variance = parts["norm: ln(10)/12"].evidence["rate"], parts["variance: ln(10)/24"].evidence["rate"]
    assert norm == 2 * variance == math.log(10) / 12
    assert all(p.passed for p in parts.values())


def test_cubic_rate_holds_for_another_draw():
    assert all(p.passed for p in collapse.rank_collapse_rate(Lab(3)))


def test_bands_name_every_variant_and_say_which_end_is_open():
    assert {variant for _, variant, *_ in collapse.BANDS} == {
        "attention", "attention-mlp", "identity", "skip", "pre-norm-skip", "pre-norm-skip-mlp", "scaled-skip"
    }  # fmt: skip
    assert all(low is not None or high is not None for _, _, _, low, high in collapse.BANDS)


def test_without_attention_only_the_parts_about_attention_alone_fail(monkeypatch):
    chosen = tuple(band for band in collapse.BANDS if band[1] in ("attention", "identity"))
    monkeypatch.setattr(collapse, "BANDS", chosen)
    monkeypatch.setattr(collapse, "runs", functools.cache(lambda variant, seed: (rank.collapse(variant, seed=seed),)))
    failed = {p.id for p in collapse.rank_collapse_depth(Lab(broken=True)) if not p.passed}
    assert failed == {
        "pure attention at 10", "pure attention at 25", "pure attention at 50", "equal rows by layer 5"
    }  # fmt: skip
