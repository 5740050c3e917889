"""Tokenizers in GGUF give the same tokens here, and in llama.cpp, as the tokenizer they were made of."""

import json

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from glassformer.config import Special
from glassformer.training.data.tokenizer import ByteTokenizer, CharTokenizer
from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf.check import TEXTS
from glassformer.weights.formats.gguf.llama import run_llama
from glassformer.weights.formats.gguf.vocabulary import TEMPLATE, read_vocabulary, write_vocabulary
from glassformer.weights.formats.gguf.write import describe, write_gguf
from glassformer.weights.tokenizer.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, USER, Pieces
from glassformer.weights.tokenizer.splits import SPLITS
from tests.weights.formats.gguf.models import NEEDS_LLAMA, bpe, llama, random

PLAIN = ("To be, or not to be: that is the question.", " a b\n\nc  d ")


def with_rule(split, size=320):
    """A byte-level BPE with another splitting rule."""
    content = json.loads(bpe(size).to_str())
    content["pre_tokenizer"] = split.steps()
    content["model"]["ignore_merges"] = split.ignore_merges
    return Tokenizer.from_str(json.dumps(content))


def pieces(prefix=True):
    """A small sentencepiece vocabulary with bytes, as Llama 2 has it."""
    words = [
        "▁the",
        "▁th",
        "▁t",
        "th",
        "he",
        "▁a",
        "▁be",
        "▁b",
        "or",
        "▁",
        *"abcdefghijklmnopqrstuvwxyzTH,.:'!?0123456789",
    ]
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL, USER, *[BYTE] * 256, *[NORMAL] * len(words)]
    scores = [0.0] * 260 + [-float(i) for i in range(len(words))]
    return Pieces(tokens, scores, types, prefix=prefix)


def char(text="\n !',.:;?ABCRTabcdefghijklmnopqrstuvwxyz"):
    return Tokenizer.from_str(CharTokenizer(text).to_json())


def framed(tokenizer):
    """The same tokenizer, with <s> in front of a text and </s> behind it."""
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer


CASES = {
    "gpt2": (lambda: bpe(320), TEXTS),
    "bytes": (lambda: Tokenizer.from_str(ByteTokenizer().to_json()), TEXTS),
    "characters": (char, ("to be, or not to be: a cat!", " A\n\nB ")),
    "characters-beyond-ascii": (lambda: char("\n abcdefghijklmnopqrstuvwxyzäöüß"), ("über die straße\n",)),
    "pieces": (lambda: pieces().tokenizer(), (*TEXTS, *PLAIN)),
    "pieces-without-prefix": (lambda: pieces(False).tokenizer(), (*TEXTS, *PLAIN)),
    "framed": (lambda: framed(bpe(320)), TEXTS),
    **{split.names[0]: (lambda split=split: with_rule(split), TEXTS) for split in SPLITS},
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    make, texts = CASES[case]
    tokenizer = make()
    size = tokenizer.get_vocab_size() + 3
    vocabulary = write_vocabulary(tokenizer, size, Special(), None)
    assert len(vocabulary.metadata["tokenizer.ggml.tokens"]) == size
    back = read_vocabulary(vocabulary.metadata)
    for text in texts:
        assert back.encode(text).ids == tokenizer.encode(text).ids
        assert back.decode(back.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)


@pytest.mark.sample(6)
@NEEDS_LLAMA
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_gives_the_same_tokens(tmp_path, case):
    make, texts = CASES[case]
    tokenizer = make()
    size = tokenizer.get_vocab_size() + 3
    config = llama(vocab_size=size, n_layers=1, special=Special())
    vocabulary = write_vocabulary(tokenizer, size, config.special, None)
    write_gguf(describe(config, random(config).state_dict()), tmp_path / "m.gguf", "f32", vocabulary, "m")
    answer = run_llama(tmp_path / "m.gguf", [3], 1, list(texts))
    assert answer["ids"] == [tokenizer.encode(text).ids for text in texts]


def test_special_tokens_types_and_template():
    tokenizer = bpe(300)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    made = write_vocabulary(tokenizer, 310, Special(bos=0, eos=(1, 5), pad=7), "{{ x }}").metadata
    types, tokens = made["tokenizer.ggml.token_type"], made["tokenizer.ggml.tokens"]
    kinds = gguf.TokenType
    assert (types[0], types[1], types[2]) == (kinds.CONTROL, kinds.CONTROL, kinds.NORMAL)
    assert (tokens[300], types[300]) == ("<tool>", kinds.USER_DEFINED)
    assert (tokens[309], types[309]) == ("[PAD309]", kinds.UNUSED)
    ids = {name: made[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "padding")}
    assert ids == {"bos": 0, "eos": 1, "eot": 5, "padding": 7}
    assert made[TEMPLATE] == "{{ x }}"
    assert read_vocabulary(made).encode("a<tool>b").ids[1] == 300


def test_no_tokenizer():
    made = write_vocabulary(None, 10, Special(bos=1), None).metadata
    assert made == {"tokenizer.ggml.model": "no_vocab", "tokenizer.ggml.bos_token_id": 1}
    assert read_vocabulary(made) is None
    assert read_vocabulary({}) is None


def test_tokens_in_front_and_behind():
    made = write_vocabulary(framed(bpe(300)), 300, Special(bos=0, eos=(1,)), None).metadata
    assert (made["tokenizer.ggml.add_bos_token"], made["tokenizer.ggml.add_eos_token"]) == (True, True)
    made = write_vocabulary(bpe(300), 300, Special(bos=0, eos=(1,)), None).metadata
    assert (made["tokenizer.ggml.add_bos_token"], made["tokenizer.ggml.add_eos_token"]) == (False, False)


def test_added_tokens_beyond_the_table_are_left_out_but_a_larger_vocabulary_is_refused():
    tokenizer = bpe(300)
    tokenizer.add_special_tokens(["<image>"])
    made = write_vocabulary(tokenizer, 300, Special(), None)
    assert "<image>" in made.notes[0]
    with pytest.raises(WeightsError, match="the tokenizer has 301 tokens, but the model has 299"):
        write_vocabulary(tokenizer, 299, Special(), None)


def odd(change):
    tokenizer = bpe(300)
    change(tokenizer)
    return tokenizer


REFUSED = {
    "another expression": lambda t: setattr(
        t,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("x+"), "isolated"), pre_tokenizers.ByteLevel(False)]),
    ),
    "a space in front": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "lower case": lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rules_that_llama_cpp_does_not_have_are_refused(case):
    with pytest.raises(WeightsError, match=r"llama\.cpp has no rule that splits text as it does") as refused:
        write_vocabulary(odd(REFUSED[case]), 300, Special(), None)
    assert "\n" not in str(refused.value)


def test_kinds_that_are_not_read():
    with pytest.raises(WeightsError, match="'bert', and only gpt2 and llama"):
        read_vocabulary({"tokenizer.ggml.model": "bert"})
    with pytest.raises(WeightsError, match="splitting rule 'jais-2', which is not known"):
        read_vocabulary(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "jais-2", "tokenizer.ggml.tokens": ["a"]}
        )
    words = Tokenizer(models.WordLevel({"cat": 0, "dog": 1}, unk_token="cat"))
    with pytest.raises(WeightsError, match="WordLevel"):
        write_vocabulary(words, 2, Special(), None)
