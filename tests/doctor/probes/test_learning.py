"""A little training: what an honest model can learn, and what it cannot."""

import pytest

from glassformer.doctor.probes import learning
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import bert, buggy, gpt2


@pytest.mark.slow
def test_a_batch_is_learned_by_heart_and_noise_is_not():
    assert learning.overfits_one_batch(gpt2()).passed
    assert learning.below_entropy(gpt2()).passed
    assert learning.below_entropy(buggy("no_causal_mask")).verdict is Verdict.FAIL


def test_a_few_steps_are_not_enough_and_an_encoder_is_not_asked():
    assert learning.overfits_one_batch(gpt2(), steps=2).verdict is Verdict.FAIL
    assert learning.overfits_one_batch(bert()).verdict is Verdict.SKIP
    assert learning.below_entropy(bert()).verdict is Verdict.SKIP
