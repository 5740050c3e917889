"""Beam search: against brute force, against the oracle, and token for token against transformers."""

import itertools

import pytest
import torch

import glassformer as gf
from glassformer.generation import generate
from glassformer.reference.decode import beam as oracle_beam
from tests.generation import peers
from tests.variants import decoder, lively


def sequence_score(model, prompt, new):
    ids = torch.tensor([prompt + new])
    with torch.no_grad():
        steps = model(ids).log_softmax(-1)[0, len(prompt) - 1 : -1]
    return float(steps.gather(1, torch.tensor(new)[:, None]).sum())


def test_one_beam_is_greedy_and_enough_beams_are_exhaustive():
    """Vocabulary 5, three new tokens: 25 beams hold every prefix of length two, so the best of 125 must come out."""
    model, _ = lively(decoder(vocab_size=5), seed=7)
    for prompt in ([0], [1, 2], [4, 4, 3]):
        everything = [list(new) for new in itertools.product(range(5), repeat=3)]
        best = max(everything, key=lambda new: sequence_score(model, prompt, new))
        assert generate(model, [prompt], 3, beams=25).new == [best]


def test_score_is_the_log_probability_per_length():
    model, _ = lively(decoder())
    out = generate(model, [[1, 2], [3]], 6, beams=3, length_penalty=0.7)
    for prompt, new, score in zip([[1, 2], [3]], out.new, out.scores, strict=True):
        assert score == pytest.approx(sequence_score(model, prompt, new) / 6**0.7, abs=1e-9)


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.0])
def test_beam_equals_oracle(length_penalty):
    model, params = lively(decoder(), seed=2)
    for prompt in ([3, 1, 4], [1], [5, 9, 2, 6]):
        ours = generate(model, [prompt], 8, beams=3, length_penalty=length_penalty, stop=[4, 7, 11])
        theirs = oracle_beam(model.config, params, prompt, 8, 3, length_penalty=length_penalty, eos=(4, 7, 11))
        assert ours.new[0] == list(theirs)[-len(ours.new[0]) :]
        assert len(theirs) in (len(ours[0]), len(ours.new[0]))


PROMPTS = [
    torch.randint(5, 90, (int(n),), generator=torch.Generator().manual_seed(i)).tolist()
    for i, n in enumerate(torch.randint(1, 14, (50,), generator=torch.Generator().manual_seed(0)))
]
EOS = [7, 11, 13, 17, 19, 23]


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", peers.FAMILIES)
@pytest.mark.parametrize(
    ("beams", "length_penalty", "penalty"), [(1, 1.0, 1.0), (3, 1.0, 1.0), (4, 2.0, 1.0), (2, -1.0, 1.0), (3, 0.0, 1.0)]
)
def test_50_ragged_prompts_equal_transformers_token_for_token(family, beams, length_penalty, penalty):
    theirs, ours = peers.pair(family)
    out = gf.generate(ours, PROMPTS, 20, beams=beams, length_penalty=length_penalty, stop=EOS)
    expected = peers.generate(theirs, PROMPTS, 20, beams, length_penalty, EOS)
    assert out.new == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", peers.FAMILIES)
@pytest.mark.parametrize("beams", [1, 3])
def test_repetition_penalty_equals_transformers(family, beams):
    """Prompts of one length: in a padded batch transformers also penalises the padding id, which we do not."""
    theirs, ours = peers.pair(family)
    prompts = [p[:4] for p in PROMPTS if len(p) >= 4]
    out = gf.generate(ours, prompts, 20, gf.Sampling(0.0, repetition_penalty=1.4), beams=beams, stop=EOS)
    assert out.new == peers.generate(theirs, prompts, 20, beams, 1.0, EOS, repetition_penalty=1.4)
