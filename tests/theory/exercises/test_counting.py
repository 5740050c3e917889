"""The solutions about counting against built configs and the engine's own n-gram tables."""

import itertools

import pytest

import glassformer as gf
from glassformer import sizing
from glassformer.theory.exercises import counting as module


@pytest.mark.parametrize(("d", "f"), [(8, 20), (12, 48)])
def test_a_block_is_the_difference_of_two_models(d, f):
    sizes = [gf.presets.gpt2(vocab_size=11, max_len=7, n_layers=n, d_model=d, n_heads=2, d_ff=f) for n in (1, 2)]
    one, two = (sizing.count(config) for config in sizes)
    assert module.block_parameters(d, f) == two - one


def test_gpt2_is_the_preset():
    assert module.gpt2_parameters(50257, 1024, 768, 12) == sizing.count(gf.presets.gpt2()) == 124_439_808


@pytest.mark.parametrize("length", [0, 1, 2])
def test_estimates_are_a_distribution_over_what_follows(length):
    """Over every text of 5 letters and every context: they sum to 1, or to 0 where nothing ever follows."""
    for text in itertools.product(range(2), repeat=5):
        for context in itertools.product(range(2), repeat=length):
            total = sum(module.ngram(list(text), list(context), word) for word in range(2))
            followed = any(text[i : i + length] == context for i in range(5 - length))
            assert total == pytest.approx(float(followed))


def test_an_estimate_by_hand():
    assert module.ngram([1, 2, 1, 3, 1], [1], 2) == 0.5
    counts_the_end = module.NGRAM.variant(module.NGRAM.mistakes[:1])
    assert counts_the_end([1, 2, 1, 3, 1], [1], 2) == pytest.approx(1 / 3)
