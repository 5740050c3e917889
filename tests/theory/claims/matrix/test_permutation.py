"""Order: engines with another mask or shifted positions are distinguished."""

import torch

from glassformer import config as c
from glassformer.model import context
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.matrix import permutation


def found_by(check, **lab):
    return {f.id: f for f in check(Lab(**lab))}


def test_a_mask_leaves_one_order_of_a_hundred_and_twenty():
    found = found_by(permutation.permutation_equivariance)
    names = ("causal mask, exact", "positions, exact", "causal mask, engine", "positions, engine")
    assert [found[name].evidence["passing"] for name in names] == [1, 1, 1, 1]
    assert found["every order of five tokens"].evidence["cases"] == 120


def test_the_control_breaks_all_but_one_order():
    found = found_by(permutation.permutation_equivariance, broken=True)
    assert found["every order of five tokens"].measured == 119


def test_an_engine_that_drops_the_causal_mask_is_caught(monkeypatch):
    original = context.attention_masks
    monkeypatch.setattr(
        context, "attention_masks", lambda tokens, windows, is_causal, *rest: original(tokens, windows, False, *rest)
    )
    assert (permutation._follows(permutation._stack(c.NoPosition(), c.DecoderConfig)) < 1e-9).sum() == 120
    assert not found_by(permutation.order_needs_position)["decoder without positions"].passed


def test_an_encoder_that_masks_the_future_is_caught(monkeypatch):
    original = context.attention_masks
    monkeypatch.setattr(
        context, "attention_masks", lambda tokens, windows, is_causal, *rest: original(tokens, windows, True, *rest)
    )
    assert not permutation._engine_stack(Lab()).passed
    assert not found_by(permutation.order_needs_position)["encoder without positions"].passed


def test_the_weight_on_the_first_token_counts_positions():
    found = found_by(permutation.order_needs_position)["weight on the first token"]
    assert found.evidence["weights"] == ["1", *[f"1/{n}" for n in range(2, 11)]]


def test_the_stacks_differ_in_what_is_asked_only():
    one, other = permutation._stack(c.NoPosition()), permutation._stack(c.NoPosition(), c.DecoderConfig)
    weights = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
