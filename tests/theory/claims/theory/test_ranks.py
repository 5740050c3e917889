"""Ranks of attention."""

import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.theory import ranks


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("claim", "parts"), [(ranks.attention_rank_bound, 6), (ranks.multihead_rank_bound, 6)])
def test_other_seeds_attain_the_bounds_too(claim, parts, seed):
    found = list(claim(Lab(seed)))
    assert len(found) == parts
    assert all(p.passed for p in found)


def test_counterexample_is_the_stated_number():
    engine = next(p for p in ranks.attention_rank_bound(Lab()) if p.id == "the engine's determinant")
    assert engine.evidence["rank"] == 2


def test_heads_that_share_weights_share_their_rank():
    failed = [p.id for p in ranks.multihead_rank_bound(Lab(broken=True)) if not p.passed]
    assert "softmax: min(n, H d_v, d), attained" in failed
    assert "rank-one X: four heads make 4" in failed


def test_exact_and_floating_rank_read_the_same_layer():
    lab, case = Lab(), (8, 2, 3, 2)
    layer = ranks.integer_layer(lab, case)
    assert all(torch.equal(p, p.round()) for p in layer.parameters())
    assert ranks._exact_linear_rank(lab, case) == ranks._layer_rank(lab, case, linear=True) == 4
