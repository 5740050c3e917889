"""Samples during training stay within the context and the vocabulary."""

import pytest

from glassformer.config import presets
from glassformer.generation import Sampling
from glassformer.model import build
from glassformer.training.data.tokenizer import CharTokenizer
from glassformer.training.sample import can_sample, sample_text

TOKENIZER = CharTokenizer("\nabcdefghijklmnopqrstuvwxyz .,")


@pytest.fixture(scope="module")
def model():
    return build(presets.nano(n_layers=1, vocab_size=TOKENIZER.vocab_size), seed=0)


def test_a_sample_fits_the_context(model):
    assert len(sample_text(model, TOKENIZER, length=500)) == model.config.max_len
    assert len(sample_text(model, TOKENIZER, length=5)) == 6
    assert len(sample_text(model, TOKENIZER, "abc", length=5)) == 8


def test_a_sample_starts_with_its_prompt_and_depends_on_the_seed(model):
    one, two, again = (sample_text(model, TOKENIZER, "abc", seed=seed) for seed in (0, 1, 0))
    assert one.startswith("abc")
    assert one == again != two


def test_sampling_and_beams_are_passed_on(model):
    greedy = [sample_text(model, TOKENIZER, "abc", Sampling(temperature=0.0), seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    assert sample_text(model, TOKENIZER, "abc", None, beams=2, length=4).startswith("abc")


def test_a_prompt_that_the_tokenizer_does_not_know_is_token_0(model):
    assert sample_text(model, TOKENIZER, "É", length=3)[0] == TOKENIZER.decode([0])


def test_tokens_that_the_tokenizer_lacks_are_left_out():
    wide = build(presets.nano(n_layers=1, vocab_size=TOKENIZER.vocab_size + 500), seed=0)
    assert len(sample_text(wide, TOKENIZER, length=40, sampling=Sampling())) < 20


def test_encoders_and_a_context_of_one_token_cannot_be_sampled(model):
    assert can_sample(model)
    assert not can_sample(build(presets.nano(n_layers=1, max_len=1)))
    sizes = {"n_layers": 1, "d_model": 12, "n_heads": 3, "d_ff": 24, "vocab_size": 30}
    assert not can_sample(build(presets.bert_base(**sizes)))
    assert can_sample(build(presets.t5_small(**sizes, n_encoder_layers=1, d_head=4)))
