"""Multiple choice and cloze rows by log-likelihood, with the conventions of lm-evaluation-harness."""

import math

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.evaluation.questions import answer, encode_pair, paired_answers, score_pairs
from glassformer.evaluation.rows import Row
from tests import folders
from tests.evaluation.test_cross_entropy import CONFIG


@pytest.fixture(scope="module")
def tokenizer():
    return folders.tokenizer()


@pytest.fixture(scope="module")
def model():
    return gf.build(c.replace(CONFIG, vocab_size=300, init_std=0.4, special=c.Special(bos=299)), seed=5)


@torch.no_grad()
def log_likelihood(model, context: list[int], continuation: list[int]) -> float:
    tokens = (context + continuation)[-17:]
    rows = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
    return float(sum(rows[-len(continuation) + i, token] for i, token in enumerate(continuation)))


def test_contexts_and_continuations_are_divided_like_the_harness(tokenizer):
    model = pytest.importorskip("lm_eval.api.model", reason="lm_eval is not installed: pip install '.[eval]'")

    class Encoder(model.TemplateLM):
        eot_token_id = 299
        loglikelihood_rolling = generate_until = None

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string, add_special_tokens=add_special_tokens is not False).ids

        def _loglikelihood_tokens(self, requests, **_):
            return [(before, after) for _, before, after in requests]

    class Request:
        def __init__(self, *args):
            self.args = args

    pairs = [("the cat", " sat"), ("the cat ", "sat"), ("", "the"), ("a  ", " b"), ("caf", "é 猫"), ("x", "y" * 20)]
    theirs = Encoder().loglikelihood([Request(*pair) for pair in pairs], disable_tqdm=True)
    assert [encode_pair(tokenizer, *pair, 299) for pair in pairs] == theirs


def test_pairs_have_the_sum_of_log_probabilities(model, tokenizer):
    texts = [("the cat", " sat on"), ("the cat sat on the mat. the dog", " sat"), ("", "a"), ("xyz" * 9, " abc")]
    pairs = [encode_pair(tokenizer, *text, 299) for text in texts]
    found = score_pairs(model, pairs)
    assert [value for value, _ in found] == pytest.approx([log_likelihood(model, *pair) for pair in pairs], abs=1e-4)
    assert len(pairs[-1][0]) > 16  # the beginning of a long context is dropped
    best = int(model(torch.tensor([[5, 6]]))[0, -1].argmax())
    assert [greedy for _, greedy in score_pairs(model, [([5, 6], [best]), ([5, 6], [(best + 1) % 300])])] == [1, 0]


def questions(count: int, group: bool = False) -> list[Row]:
    draw = np.random.default_rng(0)
    words = ["cat", "dog", "the mat", "café", "naïve log", "猫が座った"]
    rows = []
    for line in range(1, count + 1):
        picked = draw.permutation(words)[:3].tolist()
        rows.append(
            Row("the cat sat on", tuple(picked), int(draw.integers(3)), line, str(line // 4) if group else None)
        )
    return rows


def test_accuracy_is_that_of_the_most_likely_choice(model, tokenizer):
    rows = questions(40)
    found = answer(model, rows, tokenizer)
    expected = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for row, held in zip(rows, found.log_likelihoods, strict=True):
        pairs = [encode_pair(tokenizer, row.context, " " + choice, 299) for choice in row.choices]
        assert held == pytest.approx([log_likelihood(model, *pair) for pair in pairs], abs=1e-4)
        per_character = [value / len(choice) for value, choice in zip(held, row.choices, strict=True)]
        per_byte = [value / len(choice.encode()) for value, choice in zip(held, row.choices, strict=True)]
        for name, values in (("acc", held), ("acc_norm", per_character), ("acc_bytes", per_byte)):
            expected[name].append(values.index(max(values)) == row.answer)
    assert {name: metric.value for name, metric in found.metrics.items()} == {
        name: np.mean(values) for name, values in expected.items()
    }
    assert found.chance == pytest.approx(1 / 3)
    accuracy = found.metrics["acc"]
    assert accuracy.spread.standard_error == pytest.approx(np.std(expected["acc"], ddof=1) / math.sqrt(40))
    clustered = answer(model, questions(40, group=True), tokenizer)
    assert (clustered.metrics["acc"].spread.unit, clustered.metrics["acc"].spread.count) == ("groups", 11)


def test_cloze_rows_have_greedy_accuracy_and_perplexity(model, tokenizer):
    rows = [Row("the cat sat", (target,), 0, i) for i, target in enumerate(("on", "mat", "dog"))]
    found = answer(model, rows, tokenizer)
    nats = [-log_likelihood(model, *encode_pair(tokenizer, "the cat sat", " " + row.choices[0], 299)) for row in rows]
    assert found.kind == "clozes"
    assert found.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
    assert found.chance is None
    assert "3 clozes" in repr(found)


def test_answers_are_compared_row_by_row(model, tokenizer):
    other = gf.build(model.config, seed=6)
    first, second = (answer(one, questions(40), tokenizer) for one in (model, other))
    found = paired_answers(first, second)["acc"]
    assert found.value == pytest.approx(first.metrics["acc"].value - second.metrics["acc"].value)
    deltas = first.metrics["acc"].values - second.metrics["acc"].values
    assert found.spread.standard_error == pytest.approx(deltas.std(ddof=1) / math.sqrt(40))
    assert paired_answers(first, first)["acc"].spread.standard_error == 0


def test_what_cannot_be_scored_is_one_sentence(model, tokenizer):
    plain = gf.build(c.replace(model.config, special=c.Special()))
    with pytest.raises(gf.GlassformerError, match="row 4: the context is empty, and the model has no beginning"):
        answer(plain, [Row("", ("a", "b"), 0, 4)], tokenizer)
    with pytest.raises(gf.GlassformerError, match="tokens is longer than the model's context of 16"):
        answer(model, [Row("a", ("xyz" * 10, "b"), 0, 4)], tokenizer)
    with pytest.raises(gf.GlassformerError, match="need a tokenizer"):
        answer(model, [Row("a", ("x", "b"), 0, 4)])
    with pytest.raises(gf.GlassformerError, match="EncoderLM"):
        answer(gf.build(gf.presets.bert_base(n_layers=1, d_model=16, n_heads=2, d_ff=32)), questions(1), tokenizer)
    with pytest.raises(gf.GlassformerError, match="is outside the model's vocabulary"):
        answer(gf.build(CONFIG), questions(1), tokenizer)
