"""Two models on one text: the paired difference."""

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.evaluation.cross_entropy import Scored, evaluate
from glassformer.evaluation.difference import _segments, paired_difference
from glassformer.evaluation.text import Document
from tests import folders
from tests.evaluation.test_cross_entropy import CONFIG, characters, flat

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT = "".join(LETTERS[i] for i in np.random.default_rng(0).integers(0, 26, 1500))


@pytest.fixture(scope="module")
def pair():
    """A model, and the same with slightly different weights."""
    first, second = (gf.build(c.replace(CONFIG, init_std=0.4), seed=3) for _ in range(2))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
    return first, second


def test_the_paired_error_is_below_the_unpaired_one(pair):
    first, second = (evaluate(model, TEXT, characters(LETTERS)) for model in pair)
    found = paired_difference(first, second)
    assert found.measure == "bits per byte"
    assert found.value == pytest.approx(first.bits_per_byte - second.bits_per_byte, rel=1e-9)
    assert found.standard_error < 0.5 * found.unpaired_error
    low, high = found.interval
    assert low < found.value < high
    assert found.better == (None if low <= 0 <= high else "first" if found.value < 0 else "second")
    back = paired_difference(second, first)
    assert (back.value, back.standard_error) == pytest.approx((-found.value, found.standard_error))


def test_a_model_equals_itself(pair):
    one = evaluate(pair[0], TEXT, characters(LETTERS))
    found = paired_difference(one, one)
    assert (found.value, found.standard_error, found.better) == (0, 0, None)
    assert "not decided" in repr(found)


def test_token_ids_are_compared_in_nats(pair):
    tokens = np.random.default_rng(1).integers(0, 61, 300)
    first, second = (evaluate(model, tokens) for model in pair)
    found = paired_difference(first, second)
    assert found.measure == "nats per token"
    assert found.value == pytest.approx(first.nats_per_token - second.nats_per_token)


def test_models_with_different_tokenizers_are_compared_in_bits_per_byte():
    text = "äa the mat 猫 sat on the log " * 40
    byte = evaluate(flat(256), text, folders.tokenizer(256))
    pieces = evaluate(flat(300), text, folders.tokenizer(300))
    assert pieces.tokens < byte.tokens
    found = paired_difference(byte, pieces)
    # both leave out their first token, which is one byte of the first character in both
    assert found.value == pytest.approx(byte.bits_per_byte - pieces.bits_per_byte, rel=1e-9)
    assert found.better == "second"


def scored(ends: list[int], nats: list[float], left_out: int = 0) -> Scored:
    tokens = np.arange(len(ends))
    return Scored(Document(tokens, np.array(ends), "abcd"), np.array(nats), left_out)


def test_the_text_is_divided_where_tokens_of_both_end():
    # the third token of the first model has no bytes: it belongs to the second one
    first, second = scored([1, 2, 2, 4], [1.0, 2.0, 4.0, 8.0]), scored([2, 3, 4], [10.0, 20.0, 40.0])
    ours, theirs, sizes = _segments(first, second, known=True)
    assert (ours.tolist(), theirs.tolist(), sizes.tolist()) == ([7.0, 8.0], [10.0, 60.0], [2.0, 2.0])
    ours, theirs, sizes = _segments(scored([2, 2, 4], [4.0, 8.0], left_out=1), second, known=True)
    assert (ours.tolist(), theirs.tolist(), sizes.tolist()) == ([8.0], [60.0], [2.0])


def test_what_only_one_model_scores_is_left_out():
    special = c.Special(bos=255)
    with_prefix = evaluate(flat(256, special=special), "abc" * 50, folders.tokenizer(256))
    without = evaluate(flat(256), "abc" * 50, folders.tokenizer(256))
    assert with_prefix.tokens == without.tokens + 1
    assert paired_difference(with_prefix, without).value == pytest.approx(0, abs=1e-12)


def test_different_texts_are_refused(pair):
    tokenizer = characters(LETTERS)
    first = evaluate(pair[0], "abcdef", tokenizer)
    for other in ("abcdeg", ["abc", "def"]):
        with pytest.raises(gf.GlassformerError, match="different texts"):
            paired_difference(first, evaluate(pair[1], other, tokenizer))
    with pytest.raises(gf.GlassformerError, match="different texts"):
        paired_difference(evaluate(pair[0], [1, 2, 3]), evaluate(pair[1], [1, 2, 4]))
