"""generate() picks what the logits say."""

import pytest
import torch

from glassformer.doctor.probes import decoding, subject_of
from glassformer.finding import Verdict
from tests.bugs.healthy_traps import nano_style
from tests.doctor.probes.subjects import Copycat, buggy, failures, listed, sound


def test_a_correct_generate_passes_with_cache_padding_and_draft():
    findings = listed(decoding.greedy_is_greedy(sound("accepts_one_more")))
    assert {f.id for f in findings} >= {"decode_select/plain", "decode_select/cached", "decode_select/draft"}
    assert failures(findings) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("picks_second_last", "decode_select/plain"),
        ("picks_last_column", "decode_select/padded-right"),
        ("accepts_one_more", "decode_select/draft"),
        ("generates_from_last_32", "position_train_infer/generate"),
    ],
)
def test_each_wrong_choice_is_found_where_it_is_made(id, name):
    assert name in failures(decoding.greedy_is_greedy(buggy(id)))


def test_models_without_generate_and_those_that_sample_are_not_judged():
    assert {f.verdict for f in listed(decoding.greedy_is_greedy(subject_of(Copycat())))} == {Verdict.SKIP}
    assert failures(decoding.greedy_is_greedy(subject_of(nano_style(), kind="decoder"))) == []


def test_shortfall_is_zero_for_the_most_likely_token_and_blames_one_place_alone():
    subject = subject_of(Copycat())
    with subject.isolated() as isolated:
        tokens = isolated.tokens(1, 2)
        for _ in range(4):
            tokens = torch.cat([tokens, isolated.logits(tokens)[:, -1:].argmax(-1)], dim=1)
        assert decoding.shortfall(isolated, tokens, 2) == (0.0, None)
        tokens[0, 4] = (tokens[0, 4] + 1) % subject.vocab_size
        short, first = decoding.shortfall(isolated, tokens, 2)
    assert short > 0
    assert first == 2
