"""generate() picks what the logits say."""

import pytest
import torch

from glassformer.doctor.probes import decoding, subject_of
from glassformer.finding import Verdict
from tests.bugs.base_decoder import Decoder
from tests.bugs.healthy_traps import nano_style
from tests.bugs.styles import translator
from tests.doctor.probes.subjects import Copycat, buggy, failures, listed, sound, warmed


def test_a_correct_generate_passes_with_cache_padding_and_draft():
    findings = listed(decoding.greedy_is_greedy(sound("accepts_one_more")))
    assert {f.id for f in findings} >= {"decode_select/plain", "decode_select/cached", "decode_select/draft"}
    assert failures(findings) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("picks_second_last", "decode_select/plain"),
        ("picks_end_of_shortest", "decode_select/padded-right"),
        ("accepts_one_more", "decode_select/draft"),
        ("generates_from_last_32", "position_train_infer/generate"),
    ],
)
def test_each_wrong_choice_is_found_where_it_is_made(id, name):
    assert name in failures(decoding.greedy_is_greedy(buggy(id)))


class LastColumn(Decoder):
    def choose(self, logits, real):
        return logits[:, -1].argmax(-1, keepdim=True)


def test_prompts_may_have_to_be_padded_on_one_side():
    subject = sound("accepts_one_more")
    subject.model.__class__ = LastColumn
    findings = {f.id: f for f in listed(decoding.greedy_is_greedy(subject))}
    assert failures(findings.values()) == []
    assert findings["decode_select/padded-left"].passed
    assert findings["decode_select/padded-right"].evidence["explained"]


def test_models_without_generate_and_those_that_sample_are_not_judged():
    assert {f.verdict for f in listed(decoding.greedy_is_greedy(subject_of(Copycat())))} == {Verdict.SKIP}
    assert failures(decoding.greedy_is_greedy(subject_of(nano_style(), kind="decoder"))) == []


class Keeps(Decoder):
    """Its generate() continues the cache of the call before."""

    def new_cache(self):
        if getattr(self, "kept", None) is None:
            self.kept = super().new_cache()
        return self.kept

    def forward(self, idx, attention_mask=None, positions=None, cache=None):
        return super().forward(idx, None, positions, cache)


def test_a_generate_that_keeps_its_cache_is_found():
    subject = sound("accepts_one_more")
    subject.model.__class__ = Keeps
    assert failures(decoding.greedy_is_greedy(subject)) == ["state_leak/generate"]


def test_a_generate_that_drops_the_mask_of_the_source_is_found_although_its_tokens_are_the_same():
    assert failures(decoding.greedy_is_greedy(warmed(translator.build("generate_drops_mask"), kind="seq2seq"))) == [
        "pad_leak/generate"
    ]
    findings = listed(decoding.greedy_is_greedy(warmed(translator.build(), kind="seq2seq")))
    assert {f.id: f.verdict for f in findings}["decode_select/padded-right"] is Verdict.PASS


class Stops(Decoder):
    """Stops when every row has ended, and fills rows that have with padding."""

    def generate(self, idx, n):
        over = torch.zeros(len(idx), 1, dtype=torch.bool)
        for _ in range(n):
            new = self(idx)[:, -1:].argmax(-1).masked_fill(over, 0)
            idx, over = torch.cat([idx, new], 1), over | (new == self.eos_token_id)
            if bool(over.all()):
                break
        return idx


def test_what_follows_an_end_of_text_is_not_judged():
    subject = sound("accepts_one_more")
    subject.model.__class__ = Stops
    subject.model.eos_token_id = -1
    with subject.isolated(subject.warmth) as isolated, torch.no_grad():
        prompt = decoding._prompt(isolated, 2, 3)
        third = isolated.model.generate(prompt, 4)[:, 5]
    for end in set(third.tolist()):
        subject.model.eos_token_id = end
        ended = warmed(subject.model, kind="decoder")
        assert decoding.Generator(ended).ends == {end}
        assert failures(decoding.greedy_is_greedy(ended)) == []
        del ended.facts.raw["eos_token_id"]
        assert failures(decoding.greedy_is_greedy(ended)) == ["decode_select/plain"]


class Total(Decoder):
    """The number of tokens goes by another name, and is that of the whole sequence."""

    def generate(self, prompt, max_length):
        while prompt.shape[1] < max_length:
            prompt = torch.cat([prompt, self(prompt[:, -self.seen :])[:, -1:].argmax(-1)], 1)
        return prompt


@pytest.mark.parametrize(("seen", "found"), [(200, []), (16, ["position_train_infer/generate"])])
def test_a_number_of_tokens_under_another_name_is_found_by_trying(seen, found):
    subject = sound("accepts_one_more")
    subject.model.__class__, subject.model.seen = Total, seen
    assert failures(decoding.greedy_is_greedy(subject)) == found


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
