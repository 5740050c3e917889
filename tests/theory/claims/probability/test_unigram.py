"""Frequencies as the best unigram model."""

from fractions import Fraction

import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.probability import unigram


def test_the_grid_has_all_points_and_the_cases_of_the_contract():
    assert len(unigram.points(12)) == 454
    assert len({tuple(Fraction(t, d) for t in theta) for theta, d in unigram.points(12)}) == 334
    found = {p.id: p.evidence for p in unigram.unigram_mle(Lab())}
    assert found["every theta on the grid"]["cases"] == 37682
    assert found["every theta on the grid"]["different_thetas"] == 334
    assert found["KKT multipliers"]["zero_counts"] > 0


def test_nothing_to_the_zeroth_power_is_one():
    assert unigram.likelihood((2, 0, 1), (3, 0, 1)) == 9
    assert unigram.likelihood((0, 1, 0), (1, 0, 0)) == 0


def test_the_bag_of_words_knows_no_context():
    model = unigram.bag_of_words(4)
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(4.0))
    logits = model(torch.tensor([[0, 3, 1]])).detach()
    assert logits[0, 0].tolist() == pytest.approx([0, 1, 2, 3])
    assert torch.equal(logits[0, 0], logits[0, 2])
