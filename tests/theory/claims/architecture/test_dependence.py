"""Who depends on whom: engines with other masks are caught."""

import numpy as np
import pytest
import torch

from glassformer.model import context
from glassformer.theory.claims.architecture import dependence
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.small_models import decoder, unmasked


def found_by(check, **lab):
    return {f.id: f for f in check(Lab(**lab))}


def change_masks(monkeypatch, is_causal):
    original = context.attention_masks
    monkeypatch.setattr(
        context, "attention_masks", lambda tokens, windows, causal, *rest: original(tokens, windows, is_causal, *rest)
    )


def test_an_engine_without_a_causal_mask_is_caught(monkeypatch):
    change_masks(monkeypatch, is_causal=False)
    found = found_by(dependence.architecture_masks)
    failing = [id for id, finding in found.items() if not finding.passed]
    assert failing == [
        "decoder-only: derivatives", "encoder-decoder, target: derivatives", "decoder-only: a token replaced",
    ]  # fmt: skip


def test_an_encoder_that_hides_the_future_is_caught(monkeypatch):
    change_masks(monkeypatch, is_causal=True)
    found = found_by(dependence.architecture_masks)
    assert found["encoder-only: derivatives"].measured == 15
    assert found["encoder-decoder, source: derivatives"].passed  # the last source token still reaches full_mask


def test_an_engine_that_ignores_padding_is_caught(monkeypatch):
    monkeypatch.setattr(context, "padding", lambda real: torch.ones_like(real)[:, None, None, :])
    assert dependence._padding(Lab()).measured > 0


def test_causal_products_sum_to_one_for_other_seeds():
    for seed in range(3):
        model = decoder(seed=seed, vocab_size=3)
        assert dependence.total_probability(model) == pytest.approx(1, abs=1e-12)
        assert abs(dependence.total_probability(unmasked(model)) - 1) > 1e-3


def test_odds_ratio_ignores_margins():
    table = np.array([[0.1, 0.2], [0.3, 0.4]])
    assert dependence.odds_ratio(table / table.sum(0)) == pytest.approx(dependence.odds_ratio(table))
    assert dependence.odds_ratio(table / table.sum(1, keepdims=True)) == pytest.approx(0.4 * 0.1 / (0.3 * 0.2))


def test_positions_supervised():
    [found] = dependence._supervision(Lab())
    assert (found.evidence["causal"], found.evidence["masked"]) == (100, 15)
