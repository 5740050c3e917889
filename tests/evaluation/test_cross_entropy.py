"""`gf.evaluate` is the cross-entropy of every token, counted exactly, in nats, bits per byte and perplexity."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import glassformer as gf
from glassformer import config as c
from glassformer.evaluation.cross_entropy import evaluate
from glassformer.training.loop import evaluate as evaluate_state
from glassformer.training.loop import prepare_state
from tests import folders
from tests.training import tiny

CONFIG = gf.presets.nano(n_layers=1, d_model=16, n_heads=2, d_ff=32, vocab_size=61, max_len=16)
BOS = c.replace(CONFIG, special=c.Special(bos=60, eos=(59,)))


@pytest.fixture(scope="module")
def model():
    return gf.build(c.replace(CONFIG, init_std=0.4), seed=3)


def draw(n: int, seed: int = 0, below: int = 61) -> list[int]:
    return np.random.default_rng(seed).integers(0, below, n).tolist()


def characters(alphabet: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel({character: id for id, character in enumerate(alphabet)}))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return made


def flat(vocab_size: int, **changes):
    """A model that gives every token the same probability."""
    model = gf.build(c.replace(CONFIG, vocab_size=vocab_size, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@torch.no_grad()
def by_hand(model, tokens: list[int], context: int, stride: int) -> list[float]:
    """Cross-entropies, one target at a time: of token t, in the window that scores it first."""
    flat, start, last = [], 0, len(tokens) - 1 - context
    while len(flat) < len(tokens) - 1:
        start = min(start, last)
        for target in range(len(flat) + 1, start + context + 1):
            logits = model(torch.tensor([tokens[start:target]]))[0, -1].double()
            flat.append(float(logits.logsumexp(0) - logits[tokens[target]]))
        start += stride
    return flat


@pytest.mark.parametrize(("context", "stride"), [(16, None), (16, 16), (7, 3), (7, 7), (7, 100), (5, 1)])
def test_every_token_but_the_first_is_scored_once(model, context, stride):
    tokens = draw(41)
    found = evaluate(model, tokens, context=context, stride=stride)
    stride = context // 2 if stride is None else min(stride, context)
    expected = by_hand(model, tokens, context, stride)
    assert (found.tokens, found.context, found.stride) == (40, context, stride)
    assert found.nats == pytest.approx(expected, abs=1e-5)
    assert found.nats_per_token == pytest.approx(np.mean(expected), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-6)
    assert found.bits_per_byte is None
    assert found.prefix is None


def test_stride_1_is_the_definition_token_by_token(model):
    tokens = draw(301)
    found = evaluate(model, tokens, stride=1)
    exact = gf.build(model.config, seed=3).double()
    assert np.abs(found.nats - by_hand(exact, tokens, 16, 1)).max() < 1e-6 * 10  # nats of up to 10, in float32
    assert found.nats_per_token == pytest.approx(np.mean(by_hand(exact, tokens, 16, 1)), abs=1e-6)


def test_the_first_token_is_scored_after_the_beginning_of_text():
    model, tokens = gf.build(BOS, seed=3), draw(30, below=59)
    found = evaluate(model, tokens, stride=16)
    assert (found.tokens, found.prefix) == (30, 60)
    assert found.nats == pytest.approx(by_hand(model, [60, *tokens], 16, 16), abs=1e-5)
    assert "scored after token 60" in found.first_token()
    without = evaluate(model, tokens, stride=16, prefix=False)
    assert (without.tokens, without.prefix) == (29, None)
    assert "not scored" in without.first_token()
    doubled = evaluate(model, [60, *tokens], stride=16)
    assert doubled.tokens == 30
    assert doubled.nats == pytest.approx(found.nats, abs=1e-6)
    ends_only = gf.build(c.replace(BOS, special=c.Special(eos=(59,))), seed=3)
    assert evaluate(ends_only, tokens).prefix == 59


def test_neither_the_batch_nor_the_order_of_documents_matters(model, monkeypatch):
    texts = ["".join(chr(97 + i % 26) for i in draw(n, seed=n)) for n in (50, 3, 17, 1, 120)]
    tokenizer = characters("abcdefghijklmnopqrstuvwxyz")
    whole = evaluate(model, texts, tokenizer)
    turned = evaluate(model, texts[::-1], tokenizer)
    assert whole.documents == 4  # one character alone has no context
    assert whole.tokens == 49 + 2 + 16 + 119
    assert turned.nats_per_token == pytest.approx(whole.nats_per_token, rel=1e-6)
    monkeypatch.setattr("glassformer.evaluation.score.TOKENS", 1)
    monkeypatch.setattr("glassformer.evaluation.score.LOGITS", 1)
    single = evaluate(model, texts, tokenizer)
    assert single.nats == pytest.approx(whole.nats, abs=1e-5)
    alone = [evaluate(model, text, tokenizer).nats for text in texts if len(text) > 1]
    assert np.concatenate(alone) == pytest.approx(whole.nats, abs=1e-5)


def test_a_text_shorter_than_the_context_is_one_window(model):
    found = evaluate(model, torch.tensor([5, 6, 7]))
    assert (found.tokens, found.context, found.windows, found.standard_error) == (2, 2, 1, None)
    assert found.nats == pytest.approx(by_hand(model, [5, 6, 7], 2, 2), abs=1e-5)


def test_it_agrees_with_the_validation_of_training(tmp_path):
    session = tiny.session(tmp_path, "loop.eval_batches=10000")
    state = prepare_state(session.run)
    expected = evaluate_state(state, session.data.validation(session.run))
    state.model.train()
    found = evaluate(state.model, session.data.val, context=session.run.context, stride=session.run.context)
    assert state.model.training
    assert found.nats_per_token == pytest.approx(expected, rel=1e-6)
    assert found.tokens == len(session.data.val) - 1


def test_dropout_is_off():
    model = gf.build(c.replace(CONFIG, dropout=0.5), seed=1).train()
    assert np.array_equal(evaluate(model, draw(40)).nats, evaluate(model, draw(40)).nats)
    assert model.training


def test_a_uniform_byte_model_has_8_bits_per_byte():
    found = evaluate(flat(256), "aä猫 naïve café", folders.tokenizer(256))
    assert found.n_bytes == found.tokens == len("aä猫 naïve café".encode()) - 1
    assert found.bits_per_byte == pytest.approx(8, rel=1e-7)
    begins = evaluate(flat(256), "äa" * 9, folders.tokenizer(256))  # the first byte is half a character
    assert begins.bits_per_byte == pytest.approx(8, rel=1e-7)


def test_a_uniform_character_model_has_the_logarithm_of_its_vocabulary_per_character():
    found = evaluate(flat(10), "abcab" * 20, characters("abcäöüßxyz"))
    assert found.nats_per_token == pytest.approx(math.log(10), rel=1e-7)
    assert found.bits_per_byte == pytest.approx(math.log2(10), rel=1e-7)
    wide = evaluate(flat(10), "äöü" * 20, characters("abcäöüßxyz"))
    assert wide.bits_per_byte == pytest.approx(math.log2(10) / 2, rel=1e-7)


def test_bits_per_byte_count_the_bytes_of_the_source_text():
    model, tokenizer, text = gf.build(c.replace(BOS, vocab_size=300)), folders.tokenizer(), folders.TEXT
    found = evaluate(model, text, tokenizer)
    assert found.n_bytes == len(text.encode())
    assert found.bits_per_byte == pytest.approx(found.nats.sum() / math.log(2) / len(text.encode()))
    ids = evaluate(model, tokenizer.encode(text).ids, tokenizer)
    assert ids.bits_per_byte == pytest.approx(found.bits_per_byte)
    assert ids.notes == ()
    broken = evaluate(model, tokenizer.encode(text).ids[:-1], tokenizer)
    assert broken.notes == () or broken.bits_per_byte is None
    apart = evaluate(model, tokenizer.encode("a").ids + tokenizer.encode("猫").ids[1:], tokenizer)  # half a character
    assert apart.bits_per_byte is None
    assert "not what their own text encodes to" in apart.notes[0]


def test_special_tokens_in_the_text_are_reported(model):
    tokenizer = characters("abcdefghijklmnopqrstuvwxyz")
    tokenizer.add_special_tokens(["<end>"])
    assert evaluate(model, "abc", tokenizer).notes == ()
    assert "1 special token" in evaluate(model, "abc<end>abc", tokenizer).notes[0]


def test_loss_by_context_counts_every_target(model):
    found = evaluate(model, draw(201), stride=16)
    assert sum(part.tokens for part in found.by_context) == found.tokens
    assert [(part.fewest, part.most) for part in found.by_context] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 16)]
    total = sum(part.tokens * part.nats_per_token for part in found.by_context)
    assert total == pytest.approx(found.nats.sum(), rel=1e-9)
    assert found.by_context[0].tokens == found.windows - 1  # the last window is moved back and scores its end only


def test_the_representation_is_short_and_the_dict_is_plain(model):
    found = evaluate(model, draw(100))
    assert repr(found).startswith(f"<Evaluation: {found.nats_per_token:.4f} ± ")
    assert len(repr(found)) < 120
    plain = found.to_dict()
    assert plain["standard_error"] == found.standard_error
    assert plain["interval"][0] < plain["nats_per_token"] < plain["interval"][1]
    assert plain["perplexity_interval"] == tuple(map(math.exp, plain["interval"]))


def test_it_refuses_what_it_cannot_score(model):
    for arguments, words in (
        (("text",), "a text needs a tokenizer"),
        (([1],), "has no token to score, because the first token has no context"),
        (([],), "has no token to score"),
        (([1, 61],), "token id 61 is outside the model's vocabulary of 61"),
        (([[1, 2]],), "not one sequence of ids"),
        (([0.5, 1.5],), "not one sequence of ids"),
        (("a½", characters("abc")), "'½'"),
    ):
        with pytest.raises(gf.GlassformerError, match=words):
            evaluate(model, *arguments)
    with pytest.raises(gf.GlassformerError, match="because it is empty"):
        evaluate(gf.build(BOS), [])
    with pytest.raises(gf.GlassformerError, match="context=17 must be between 1 and the model's max_len, 16"):
        evaluate(model, list(range(30)), context=17)
    with pytest.raises(gf.GlassformerError, match="stride=0 must be at least 1"):
        evaluate(model, list(range(30)), stride=0)
    encoder = gf.build(gf.presets.bert_base(n_layers=1, d_model=16, n_heads=2, d_ff=32, vocab_size=61))
    with pytest.raises(gf.GlassformerError, match="EncoderLM does not predict"):
        evaluate(encoder, [1, 2, 3])
    pair = gf.build(gf.presets.transformer_base(n_layers=1, n_encoder_layers=1, d_model=16, n_heads=2, d_ff=32))
    with pytest.raises(gf.GlassformerError, match="Seq2Seq does not predict"):
        evaluate(pair, [1, 2, 3])


def test_a_model_that_gives_nan_is_refused():
    model = gf.build(CONFIG)
    with torch.no_grad():
        model.embed.tokens.weight[3] = float("nan")
    with pytest.raises(gf.GlassformerError, match="tokens is NaN or infinite"):
        evaluate(model, [1, 2, 3, 4])
