"""Text in, text out: pieces join to the whole, characters are not torn, stop texts are not shown."""

import re

import pytest

import glassformer as gf
from glassformer import config as c
from glassformer.generation.text import Continuation, TextPieces
from glassformer.model import build
from tests import folders, variants
from tests.generation.test_loop import Script


@pytest.fixture(scope="module")
def tokenizer():
    return folders.tokenizer()


@pytest.fixture(scope="module")
def model():
    config = gf.presets.llama_tiny(vocab_size=300, n_layers=1, max_len=64, head=c.Head(tied=False))
    return build(c.replace(config, init_std=0.4))


def saying(text, tokenizer, eos=()):
    """A model that says exactly this."""
    made = build(gf.presets.llama_tiny(vocab_size=300, n_layers=1, max_len=64, special=c.Special(eos=eos)))
    made.head = Script([tokenizer.encode(text).ids + [0] * 64], 300)
    return made


def test_pieces_join_to_what_run_returns(model, tokenizer):
    job = Continuation(model, tokenizer, "the cat", max_new_tokens=40)
    pieces = list(job.pieces(gf.Sampling(), seed=3))
    again = Continuation(model, tokenizer, "the cat", max_new_tokens=40).run(gf.Sampling(), seed=3)
    assert "".join(pieces) == again["text"]
    assert again["text"].startswith("the cat")
    assert again["new_tokens"] == job.new
    assert len(pieces) > 10
    assert again["finished"] == "length"


def test_characters_of_several_bytes_arrive_whole(tokenizer):
    text = " 猫が座 naïve"
    n = len(tokenizer.encode(text).ids)
    pieces = list(Continuation(saying(text, tokenizer), tokenizer, "the", max_new_tokens=n).pieces(gf.Sampling(0.0)))
    assert "".join(pieces) == "the" + text
    assert not any("�" in piece for piece in pieces)


def cut(text, tokenizer, tokens, **changes):
    """What a reader sees of a text that the limit of tokens cuts, and the whole of what was generated."""
    job = Continuation(saying(text, tokenizer), tokenizer, "the", max_new_tokens=tokens, **changes)
    return "".join(job.pieces(gf.Sampling(0.0), whole_words=True)), tokenizer.decode(job.head + job.new)


def test_printed_text_never_ends_in_the_middle_of_a_word(tokenizer):
    text = " cat sat on xyzzy, naïve dogs' mat"
    total = len(tokenizer.encode(text).ids)
    seen = set()
    for tokens in range(1, total + 1):
        printed, whole = cut(text, tokenizer, tokens)
        assert printed == whole or printed.endswith("…")
        assert whole.startswith(printed.removesuffix("…"))
        assert set(re.findall(r"\w+", printed)) <= set(re.findall(r"\w+", "the" + text))
        seen.add(printed == whole)
    assert seen == {True, False}


def test_text_without_spaces_and_ids_are_printed_as_they_are(tokenizer, model):
    for text in ("xyzzy", "猫が座った猫が座"):
        tokens = len(tokenizer.encode(text).ids)
        assert cut(text, tokenizer, tokens) == ("the" + text,) * 2
    job = Continuation(model, None, "5 7", ids=True, max_new_tokens=4)
    assert "".join(job.pieces(gf.Sampling(0.0), whole_words=True)) == " ".join(map(str, [5, 7, *job.new]))


def test_a_stop_prints_the_last_word_whole(tokenizer):
    job = Continuation(saying(" cat sat. the", tokenizer), tokenizer, "the", stop=(".",), max_new_tokens=30)
    assert "".join(job.pieces(gf.Sampling(0.0), whole_words=True)) == "the cat sat"


def test_stop_text_ends_the_output_and_is_not_shown(tokenizer):
    text = " cat sat. the log"
    for stop in ("sat.", ". t", "t. the l"):
        job = Continuation(saying(text, tokenizer), tokenizer, "the. t", stop=(stop,), max_new_tokens=30)
        pieces = list(job.pieces(gf.Sampling(0.0)))
        assert "".join(pieces) == "the. t" + text[: text.index(stop)], stop
        assert job.finished == "stop"


def test_what_may_begin_a_stop_text_is_held_back_then_released(tokenizer):
    job = Continuation(saying(" sat on", tokenizer), tokenizer, "the", stop=(" sat under",), max_new_tokens=3)
    assert "".join(job.pieces(gf.Sampling(0.0))) == "the" + tokenizer.decode(job.new)


def test_end_of_text_is_a_stop(tokenizer):
    end = tokenizer.encode(".").ids[0]
    job = Continuation(saying(" cat.", tokenizer, eos=(end,)), tokenizer, "the", max_new_tokens=30)
    assert job.run(gf.Sampling(0.0))["finished"] == "stop"
    assert job.new[-1] == end


def test_ids_in_ids_out(model):
    result = Continuation(model, None, "5, 7 9", ids=True, max_new_tokens=4).run(gf.Sampling(0.0))
    assert result["prompt_tokens"] == [5, 7, 9]
    assert [int(t) for t in result["text"].split()] == [5, 7, 9, *result["new_tokens"]]
    stop = str(result["new_tokens"][1])
    stopped = Continuation(model, None, "5 7 9", ids=True, stop=(stop,), max_new_tokens=4).run(gf.Sampling(0.0))
    assert stopped["new_tokens"] == result["new_tokens"][:2] or result["new_tokens"][0] == result["new_tokens"][1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_is_counted_and_leaves_greedy_text_as_it_is(model, tokenizer, temperature):
    plain = Continuation(model, tokenizer, "the cat", max_new_tokens=20).run(gf.Sampling(temperature))
    job = Continuation(model, tokenizer, "the cat", max_new_tokens=20, draft=model, draft_tokens=3)
    result = job.run(gf.Sampling(temperature))
    assert plain["draft"] is None
    assert result["draft"] == {"proposed": 15, "accepted": 15, "passes": 5}
    assert len(result["new_tokens"]) == 20
    assert (result["text"] == plain["text"]) == (temperature == 0)


def test_a_stop_text_inside_an_accepted_block_is_not_shown(model, tokenizer):
    plain = Continuation(model, tokenizer, "the cat", max_new_tokens=20).run(gf.Sampling(0.0))
    message = plain["text"][len("the cat") :]
    stop = message[len(message) // 2 : len(message) // 2 + 3]
    runs = [
        Continuation(model, tokenizer, "the cat", max_new_tokens=20, stop=(stop,), draft=draft).run(gf.Sampling(0.0))
        for draft in (None, model)
    ]
    assert runs[0]["text"] == runs[1]["text"] == "the cat" + message[: message.index(stop)]
    assert runs[1]["finished"] == "stop"


def test_by_default_the_context_is_not_overrun(model, tokenizer):
    result = Continuation(model, None, "5 " * 60, ids=True).run(gf.Sampling(0.0))
    assert len(result["new_tokens"]) == 4
    with pytest.raises(ValueError, match="fills the context of 64"):
        Continuation(model, None, "5 " * 64, ids=True).run(gf.Sampling(0.0))


def test_an_encoder_decoder_answers_without_repeating_the_prompt():
    seq2seq = build(variants.seq2seq())
    result = Continuation(seq2seq, None, "5 7 9", ids=True, max_new_tokens=4).run(gf.Sampling(0.0), beams=2)
    assert [int(t) for t in result["text"].split()] == result["new_tokens"]
    assert result["score"] < 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokenizer": None}, r"no tokenizer\.json"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "", "ids": True}, "the prompt is empty"),
        ({"prompt": "a b", "ids": True}, "with --ids, text is token ids"),
        ({"stop": ("",)}, "a stop text is empty"),
    ],
)
def test_bad_input_is_refused_in_words(model, tokenizer, arguments, words):
    with pytest.raises(ValueError, match=words):
        Continuation(**{"model": model, "tokenizer": tokenizer, "prompt": "the", **arguments})


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer):
    small = build(variants.decoder())
    with pytest.raises(ValueError, match="the tokenizer has 300 tokens, the model 31"):
        Continuation(small, tokenizer, "the")


@pytest.mark.parametrize(
    ("texts", "stops", "pieces", "stopped"),
    [
        (["a", "ab", "abc"], (), ["a", "b", "c", ""], False),
        (["a", "a\ufffd", "aé"], (), ["a", "", "é", ""], False),
        (["x\ufffd"], (), ["x", "\ufffd"], False),
        (["ab", "ab</", "ab</s>c"], ("</s>",), ["ab", "", "", ""], True),
        (["ab<", "ab<b"], ("</s>",), ["ab", "<b", ""], False),
        (["ab<"], ("</s>",), ["ab", "<"], False),
    ],
)
def test_pieces_of_a_growing_text_are_final(texts, stops, pieces, stopped):
    growing = TextPieces(stops)
    assert [growing.add(text) for text in texts] + [growing.add(texts[-1], last=True)] == pieces
    assert growing.stopped == stopped
    assert growing.text == "".join(pieces)
