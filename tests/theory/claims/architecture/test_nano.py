"""Training: gradients by differences, baselines by hand."""

import math

import numpy as np
import pytest

from glassformer.theory.claims.architecture import nano
from glassformer.theory.claims.claim import Lab


def test_gradients_agree_in_every_tensor():
    errors = nano.gradient_errors(1, entries=2)
    assert len(errors) == 35
    assert max(errors.values()) < 1e-5


def test_a_detached_branch_is_seen_in_its_own_tensors():
    errors = nano.gradient_errors(0, nano.Cut("blocks.1.attention.out"), entries=2)
    wrong = {name for name, error in errors.items() if error > 1e-5}
    assert {f"decoder.blocks.1.attention.{x}.weight" for x in "qkvo"} <= wrong
    assert "decoder.norm.weight" not in wrong


def test_the_add_one_bigram_by_hand():
    train, held = np.array([0, 1, 0, 1, 0]), np.array([0, 1, 1])
    # pairs 01 01 10 10: p(1|0) = 3/4, p(1|1) = 1/4
    assert nano.add_one_loss(train, held, 2) == pytest.approx(-(math.log(3 / 4) + math.log(1 / 4)) / 2)


def test_characters_are_those_of_the_text():
    tokens, size = nano.characters()
    assert tokens.min() >= 0
    assert tokens.max() < size < 200
    assert len(tokens) == len(nano.embedded())


def test_the_lines_of_the_source_are_the_stated_ones():
    found = {f.id: f for f in nano.train_nano_gpt(Lab(broken=True))}["lines of the Markov source"]
    assert found.passed
    assert found.evidence["entropy rate"] == pytest.approx(1.5247, abs=5e-5)


def test_the_recorded_run_is_between_entropy_and_bigram():
    assert nano.STATED["entropy rate"] < nano.RECORDED.losses[-1] < nano.STATED["bigram"] - 1


@pytest.mark.slow
def test_training_goes_as_recorded():
    curve = nano.markov_curve(0)
    assert curve.steps == nano.RECORDED.steps
    assert np.allclose(curve.losses, nano.RECORDED.losses, atol=0.02)
