"""Counts of one block."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.sizing import count
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.counting import block
from tests.sampled import examples


@settings(deadline=None, max_examples=examples(20))
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 70))
def test_formula_counts_any_block_the_engine_builds(heads, width, f):
    d = heads * width
    assert block.formula(d, f) == block.engine_counts(block.block_config(d, f, heads))


def test_formula_does_not_fit_a_block_without_biases():
    assert block.formula(48, 100) != block.engine_counts(block.block_config(48, 100, 4, bias=False))


def test_engine_counts_are_the_whole_block():
    config = block.moe_config(16, 4, 2)
    outside = 2 * 16 + 2 * 16  # token table (tied) and final norm
    assert sum(block.engine_counts(config)) == count(config) - outside


@pytest.mark.parametrize("chosen", [1, 3, 8])
def test_one_token_trains_the_experts_it_visits_and_no_other(chosen):
    assert block._visited_share(chosen, 4) == Fraction(2 * chosen, 2 * chosen + 1)


def test_unnormalised_gates_scale_a_single_expert():
    assert block._identical_experts_error(Lab())[0] < 1e-12
    assert block._identical_experts_error(Lab(broken=True))[0] > 1e-2


def test_the_numbers_of_the_base_transformer_are_in_the_evidence():
    parts = {p.id: p.evidence for p in block.block_param_count(Lab())}
    assert parts["with biases and norms"]["total"] == 3_152_384
    assert parts["weights alone at d = 512, f = 2048"]["share"] == "2/3"
