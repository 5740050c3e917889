"""What is special about the claims on weights that sum to 1."""

import sys

import torch

from glassformer.finding import Verdict
from glassformer.model import NO_TAP, attention
from glassformer.theory.claims.claim import CHECKS, Lab
from glassformer.theory.claims.registry import check
from glassformer.theory.claims.weights import simplex


def parts(id, **lab):
    return {f.id: f for f in CHECKS[id](Lab(**lab))}


def test_without_z3_the_certificate_carries_the_claim_and_the_rest_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "z3", None)
    found = check("convex-weights-upper-bound")
    assert found.verdict is Verdict.PASS
    assert "not examined: no weight above 1" in found.why
    assert check("convex-weights-upper-bound", broken=True).verdict is Verdict.FAIL


def test_float64_reaches_the_ends_of_the_interval():
    assert parts("softmax-row-stochastic")["end points in float64"].evidence["weights"] == [1.0, 0.0]


def test_a_softmax_that_spreads_an_empty_row_evenly_is_caught(monkeypatch):
    original = attention.explicit_attention

    def large_negative_instead_of_minus_infinity(q, k, v, scale, mask=None, is_causal=False, dropout=0.0, tap=NO_TAP):
        if mask is not None:
            mask = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype).masked_fill(~mask, -1e30)
        return original(q, k, v, scale, mask, is_causal, dropout, tap)

    monkeypatch.setattr(attention, "explicit_attention", large_negative_instead_of_minus_infinity)
    assert not parts("softmax-row-stochastic")["all masked is NaN"].passed


def test_a_softmax_without_the_row_maximum_is_caught(monkeypatch):
    def naive(scores, dim, dtype=None):
        return scores.exp() / scores.exp().sum(dim, keepdim=True)

    monkeypatch.setattr(torch.Tensor, "softmax", naive)
    found = parts("softmax-shift-invariance")
    assert not found["scores up to 1e4, float32"].passed
    assert not found["against 50 digits"].passed


def test_float32_overflows_at_the_stated_limit():
    found = parts("softmax-shift-invariance")
    assert found["limit in float32"].passed
    assert simplex.FLOAT32_LIMIT == 88.7229
    assert found["naive form overflows, float32"].measured == 64
