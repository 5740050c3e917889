"""Every tokenizer goes there and back, and says the same as the `tokenizer.json` it writes."""

import json
import os
import subprocess
import sys
from functools import cache

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from glassformer.training.data import tokenizer as tok
from glassformer.training.data.corpus import DataError
from glassformer.training.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    JsonTokenizer,
    UnknownCharacter,
    from_json,
    load,
    pieces,
    train_tokenizer,
)

any_text = st.text(st.characters(exclude_categories=("Cs",)))
ALPHABET = "\n\t\r !'abcXYZ019éß–☃漢\u0301\u2028𝔘🎭"
WORDS = (
    "The quick brown fox, 42 of them, isn't lazy.\nÜber naïve façades: 漢字 🎭\n\n"
    "New paragraph\tand tabs.  Two spaces.\n"
)


def refusal(act, kind=DataError):
    with pytest.raises(kind) as refused:
        act()
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@cache
def characters():
    return CharTokenizer("".join(sorted(ALPHABET)))


@cache
def bpe():
    return train_tokenizer("bpe", [WORDS * 20], 320)


@cache
def engine(make):
    return tokenizers.Tokenizer.from_str(make().to_json())


# the fast way and the `tokenizers` way


@hypothesis.given(any_text)
def test_bytes_agree_with_their_json_on_any_text(text):
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode()) == engine(ByteTokenizer).encode(text).ids
    assert ByteTokenizer().decode(ids) == text == engine(ByteTokenizer).decode(ids.tolist())


@hypothesis.given(st.lists(st.integers(0, 300), max_size=12) | st.binary(max_size=12).map(list))
def test_any_bytes_decode_as_their_json_does_with_replacement_characters(ids):
    assert ByteTokenizer().decode(ids) == engine(ByteTokenizer).decode(ids)


@pytest.mark.parametrize("cut", range(1, 4))
def test_the_first_bytes_of_a_character_show_as_unfinished(cut):
    ids = ByteTokenizer().encode("a🎭")[: 1 + cut]
    assert ByteTokenizer().decode(ids) == "a\ufffd" == engine(ByteTokenizer).decode(ids.tolist())


@hypothesis.given(st.text(ALPHABET))
def test_characters_agree_with_their_json_over_the_alphabet(text):
    ids = characters().encode(text)
    assert ids.tolist() == engine(characters).encode(text).ids
    assert characters().decode(ids) == text == engine(characters).decode(ids.tolist())


@hypothesis.given(any_text)
def test_bpe_goes_there_and_back_and_agrees_with_its_json(text):
    hypothesis.assume(tok.END not in text)
    ids = bpe().encode(text)
    assert ids.tolist() == engine(bpe).encode(text).ids
    assert bpe().decode(ids) == text


def test_all_byte_values_and_many_characters_agree():
    every = "".join(chr(i) for i in range(0x10FFFF) if not 0xD800 <= i < 0xE000)[::97]
    alphabet = CharTokenizer(every)
    theirs = tokenizers.Tokenizer.from_str(alphabet.to_json())
    assert alphabet.encode(every).tolist() == list(range(len(every))) == theirs.encode(every).ids
    assert alphabet.decode(range(len(every))) == every == theirs.decode(list(range(len(every))))
    assert set(ByteTokenizer().encode(every)) == set(every.encode())


@pytest.mark.parametrize("make", [ByteTokenizer, characters, bpe])
def test_json_is_written_as_tokenizers_writes_it_and_recognised(make, tmp_path):
    (tmp_path / tok.FILE).write_text(make().to_json(), encoding="utf-8")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / tok.FILE))
    assert theirs.to_str(pretty=True) == make().to_json()
    theirs.save(str(tmp_path / "again.json"))
    for path in (tmp_path, tmp_path / tok.FILE, str(tmp_path / "again.json")):
        found = load(path)
        assert (type(found), found.kind, found.vocab_size) == (type(make()), make().kind, make().vocab_size)
        assert found.encode("abc XYZ").tolist() == make().encode("abc XYZ").tolist()


def test_what_only_looks_like_ours_is_left_to_tokenizers():
    for make, change in (
        (characters, {"normalizer": {"type": "Lowercase"}}),
        (ByteTokenizer, {"decoder": None}),
        (characters, {"added_tokens": []} | {"decoder": {"type": "ByteFallback"}}),
    ):
        found = from_json(json.dumps(json.loads(make().to_json()) | change))
        assert isinstance(found, JsonTokenizer)
        assert found.kind == "json"
    lowered = from_json(json.dumps(json.loads(characters().to_json()) | {"normalizer": {"type": "Lowercase"}}))
    assert lowered.decode(lowered.encode("ABC")) == "abc"


# refusals


def test_an_unknown_character_is_a_sentence_with_its_place():
    message = refusal(lambda: characters().encode("ab\nc Q"), UnknownCharacter)
    assert "'Q' (U+0051) at offset 5, line 2 of the text" in message
    assert f"{len(ALPHABET)} characters" in message
    assert "byte" in message
    with pytest.raises(UnknownCharacter) as refused:
        characters().encode("\U0010ffff")
    assert "(U+10FFFF) at offset 0, line 1" in str(refused.value)
    assert "at offset 100, line 8 of play.txt" in str(refused.value.at("play.txt", 100, 7))


def test_an_unknown_character_is_an_error_in_the_json_too_and_never_dropped():
    with pytest.raises(Exception, match="WordLevel"):
        engine(characters).encode("Q")
    strict = from_json(json.dumps(json.loads(characters().to_json()) | {"decoder": None}))
    assert "characters that the tokenizer does not know" in refusal(lambda: strict.encode("Q"))


@pytest.mark.parametrize("make", [ByteTokenizer, bpe])
def test_half_a_surrogate_pair_is_a_sentence(make):
    assert "U+D83D at offset 1" in refusal(lambda: make().encode("a\ud83d"))


def test_surrogates_are_unknown_characters_and_no_vocabulary():
    assert "U+D83D" in refusal(lambda: characters().encode("a\ud83d"))
    assert "surrogate" in refusal(lambda: CharTokenizer("a\ud83d"))


@pytest.mark.parametrize("text", ["", "aa"])
def test_a_vocabulary_has_different_characters(text):
    assert "must be different" in refusal(lambda: CharTokenizer(text))


@pytest.mark.parametrize("make", [ByteTokenizer, characters, bpe])
def test_ids_past_the_vocabulary_have_no_text_and_negative_ones_are_refused(make):
    ids = make().encode("abc").tolist()
    assert make().decode([*ids, make().vocab_size, 60_000]) == "abc"
    assert "-1 is negative" in refusal(lambda: make().decode([*ids, -1]))


@pytest.mark.parametrize("make", [ByteTokenizer, characters, bpe])
def test_nothing_is_nothing(make):
    assert make().encode("").tolist() == []
    assert make().encode("").dtype == np.uint16
    assert make().decode([]) == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff", "not UTF-8"),
        (b"{", "can read"),
        (b"[]", "can read"),
        (b'{"model": {"vocab": "ab", "type": "WordLevel"}}', "can read"),
        (b'{"model": 1}', "can read"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_a_sentence(tmp_path, content, words):
    if content is not None:
        (tmp_path / tok.FILE).write_bytes(content)
    message = refusal(lambda: load(tmp_path))
    assert words in message
    assert str(tmp_path / tok.FILE) in message


def test_an_empty_vocabulary_is_refused():
    empty = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str()
    assert "empty vocabulary" in refusal(lambda: from_json(empty))


# training


def test_characters_are_the_sorted_ones_of_the_corpus():
    found = train_tokenizer("char", ["hello", " wörld", "\n🎭"])
    assert found.characters == "\n dehlorwö🎭"
    assert (found.vocab_size, found.dtype, found.separator) == (11, np.uint16, "\n")


def test_large_vocabularies_take_four_bytes():
    many = CharTokenizer("".join(chr(i) for i in range(0x20000) if not 0xD800 <= i < 0xE000))
    assert many.encode("abc").dtype == np.uint32
    edge = CharTokenizer("".join(chr(i) for i in range(0x10000 + 0x800) if not 0xD800 <= i < 0xE000))
    assert edge.vocab_size == 1 << 16
    assert edge.encode(chr(0x107FF)).dtype == np.uint16
    assert edge.encode(chr(0x107FF)).tolist() == [65535]


def test_bpe_has_the_size_asked_for_an_end_of_text_and_all_bytes():
    found = bpe()
    assert (found.kind, found.vocab_size, found.end_of_text, found.separator) == ("bpe", 320, 0, tok.END)
    assert found.encode(f"a{tok.END}b")[1] == 0
    assert len(found.encode("The quick")) < 9
    assert train_tokenizer("bpe", ["tiny"], 5000).vocab_size < 300


@pytest.mark.slow
def test_bpe_training_is_deterministic():
    """In another process, with other hashes and with threads."""
    make = (
        "import random; from glassformer.training.data.tokenizer import train_tokenizer; r = random.Random(0);"
        "text = ' '.join(''.join(r.choices('abcdé', k=r.randint(1, 5))) for _ in range(5000));"
        "made = train_tokenizer('bpe', [text[:9000], text[9000:]], 600).to_json()"
    )
    here: dict = {}
    exec(make, here)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "TOKENIZERS_PARALLELISM": "true", "PYTHONIOENCODING": "utf-8"}
    other = [sys.executable, "-c", f"{make}; print(made)"]
    there = subprocess.run(other, env=environment, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert there.strip() == here["made"]


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("word", None, "char, byte, bpe"),
        ("bpe", None, "257 or more"),
        ("bpe", 256, "vocab_size=256"),
        ("char", 65, "for bpe only"),
        ("byte", 9, "for bpe only"),
    ],
)
def test_wrong_training_settings_are_sentences(kind, size, words):
    assert words in refusal(lambda: train_tokenizer(kind, ["abc"], size))


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_an_error_of_the_corpus_comes_through(kind):
    def texts():
        yield "good"
        raise DataError("bad.xyz is not a text.")

    assert refusal(lambda: train_tokenizer(kind, texts(), 300 if kind == "bpe" else None)) == "bad.xyz is not a text."


# streaming


def spaced_text():
    """Text rich in what splitting rules care about."""
    words = st.sampled_from(["a", "I'm", "x1", "12", ",", "...", "é", "漢", "_", "don't\n's"])
    gaps = st.sampled_from([" ", "  ", "\n", "\n\n", "\r\n", " \n", "\n ", "\t", "", " \n\n  "])
    return st.lists(st.tuples(words, gaps), max_size=60).map(lambda pairs: "".join(w + g for w, g in pairs))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def modern():
    """Byte-level BPE with the splitting rule of GPT-4 and Llama 3."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([WORDS * 20], trainer)
    return from_json(made.to_str())


@pytest.mark.parametrize("make", [bpe, modern])
@hypothesis.given(text=spaced_text(), size=st.integers(1, 20))
def test_pieces_encode_as_the_whole(make, text, size):
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    ends = np.cumsum([len(part) for part in parts])[:-1].tolist()
    # a text with no place to cut is cut anywhere
    hypothesis.assume(all(tok._EDGE.match(text, end) or tok._SPACE.match(text, end) for end in ends))
    assert [i for part in parts for i in make().engine.encode(part).ids] == make().engine.encode(text).ids


@pytest.mark.parametrize("make", [bpe, modern])
@hypothesis.given(text=spaced_text())
def test_a_growing_text_is_cut_where_nothing_changes(make, text):
    cut = tok._last_cut(text, 3)
    head, tail = make().engine.encode(text[:cut]).ids, make().engine.encode(text[cut:]).ids
    hypothesis.assume(len(text) <= 12 or cut < len(text))  # a text with no place to cut is cut anywhere
    assert head + tail == make().engine.encode(text).ids


def test_texts_without_lines_or_spaces_are_cut_all_the_same():
    assert len(list(pieces("word " * 200_000))) > 3
    assert [len(part) for part in pieces("x" * 1000, 10)][:2] == [50, 50]
    assert "".join(pieces("x" * 1000, 10)) == "x" * 1000


def test_a_long_text_encodes_as_its_json_does():
    text = WORDS * 3000
    assert bpe().encode(text).tolist() == engine(bpe).encode(text).ids
