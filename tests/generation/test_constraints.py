"""Forced and suppressed tokens: the engine against the oracle, and against the processors of transformers."""

import pytest
import torch
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

import glassformer as gf
from glassformer.config import Special
from glassformer.generation.constraints import Constraints
from glassformer.reference.decode import beam_seq2seq, greedy_seq2seq
from tests.variants import decoder, lively, seq2seq

SPECIAL = Special(start=3, eos=(7,), forced_bos=5, forced_eos=7, suppressed=(0, 2, 30))


def test_apply_equals_the_processors_of_transformers():
    scores = torch.randn(2, 31, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    constraints = Constraints(SPECIAL, max_new_tokens=4)
    assert SPECIAL.limits_generation
    for step in range(4):
        ids = torch.zeros(2, 1 + step, dtype=torch.long)  # transformers counts the start token
        expected = SuppressTokensLogitsProcessor(list(SPECIAL.suppressed))(ids, scores)
        expected = ForcedBOSTokenLogitsProcessor(5)(ids, expected)
        expected = ForcedEOSTokenLogitsProcessor(5, 7)(ids, expected)
        assert torch.equal(constraints.apply(scores, step), expected), step


def test_nothing_changes_without_constraints():
    scores = torch.randn(2, 31)
    constraints = Constraints(Special(eos=(7,)), max_new_tokens=4)
    assert not constraints.special.limits_generation
    assert constraints.apply(scores, 0) is scores


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_and_beams_equal_the_oracle(cache):
    model, params = lively(seq2seq(special=SPECIAL), seed=1)
    for source in ([3, 1, 4], [1], [5, 9, 2, 6]):
        alone = gf.generate(model, [source], 8, cache=cache)[0]
        assert alone == greedy_seq2seq(model.config, params, source, 8, stop=(7,))
        searched = gf.generate(model, [source], 8, beams=3, cache=cache)[0]
        assert searched == beam_seq2seq(model.config, params, source, 8, 3, eos=(7,))
        for new in (alone[1:], searched[1:]):
            assert new[0] == 5
            assert new[-1] == 7
            assert not set(new) & {0, 2, 30}


def test_sampling_obeys_them_too():
    model, _ = lively(decoder(special=Special(forced_bos=5, forced_eos=7, suppressed=tuple(range(8, 31)))))
    for seed in range(20):
        new = gf.generate(model, [[1, 2]], 6, sampling=gf.Sampling(temperature=2.0), seed=seed, stop=[]).new[0]
        assert new[0] == 5
        assert new[-1] == 7
        assert max(new) <= 7
    one = gf.generate(model, [[1, 2]], 1, stop=[]).new[0]
    assert one == [7]  # with a single token, the last one wins, as in transformers


def test_a_draft_does_not_know_them():
    model, _ = lively(decoder(special=Special(suppressed=(1,))))
    with pytest.raises(ValueError, match="leave draft out"):
        gf.generate(model, [[1, 2]], 6, draft="lookup")
