"""A corpus becomes token files that say what they are, in bounded memory, whole or not at all."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from glassformer.training.data import build, corpus, parts, reading
from glassformer.training.data import source as data
from glassformer.training.data import tokenizer as tok
from glassformer.training.data.batches import Batches
from glassformer.training.data.corpus import SHAKESPEARE, DataError, Document
from glassformer.training.data.source import open_prepared, prepare
from glassformer.training.data.tokenizer import CharTokenizer, train_tokenizer
from glassformer.training.sections import Data
from tests.sampled import examples

SHARED = Path(os.environ.get("GLASSFORMER_DATA", "../shared/data")) / SHAKESPEARE
TEXT = "".join(f"Line {i}: the quick brown fox, naïve – jumps.\n" for i in range(200))


def refusal(act, kind=DataError):
    with pytest.raises(kind) as refused:
        act()
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8", newline="")
    return tmp_path / "text.txt"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for name, content in (("a.txt", "abc"), ("b.txt", "de"), ("deep/c.txt", "fghij")):
        (tmp_path / "texts" / name).write_text(content)
    return tmp_path / "texts"


# what comes out


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("?\n\nGREMIO:\nGood morrow", "GREMIO:"),
        ("ing the walrus sai", "the"),  # the split cuts words in two
        (" walrus swam", "walrus"),
        ("x c['red'] {a} walrus, sea", "walrus,"),  # no quotes and brackets, which a shell would read
        ("x c['red'] b[1] y", "c['red']"),
        ("th walrus\n", "walrus"),
        ("12 + 3 = 15", "+"),
        ("all", "all"),
        (" \n", ""),
    ],
)
def test_a_prompt_is_a_whole_word_where_the_text_has_one(text, word):
    assert data.whole_word(text) == word


def test_the_first_word_of_a_split_text_is_whole(tmp_path):
    words = [f"word{'abcdefgh'[i % 8] * (i % 5)}" for i in range(200)]
    (tmp_path / "t.txt").write_text(" ".join(words))
    for kind, size in (("char", None), ("byte", None), ("bpe", 300)):
        made = prepare(tmp_path / "t.txt", kind, tmp_path / kind, vocab_size=size, validation_fraction=0.13)
        assert made.first_word() in words


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("byte", None), ("bpe", 300)])
def test_tokens_are_those_of_the_text_on_either_side_of_the_split(text, tmp_path, kind, size):
    made = prepare(text, kind, tmp_path / "out", vocab_size=size)
    cut = int(len(TEXT) * 0.9)
    assert made.tokenizer.decode(made.train) == TEXT[:cut]
    assert made.tokenizer.decode(made.val) == TEXT[cut:]
    assert made.train.tolist() == made.tokenizer.encode(TEXT[:cut]).tolist()
    assert sorted(os.listdir(tmp_path / "out")) == [
        "manifest.json",
        "tokenizer.json",
        "train-00000.bin",
        "val-00000.bin",
    ]


def test_the_manifest_says_what_was_made_of_what(text, tmp_path):
    made = prepare(text, "char", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (file,) = found["files"]
    assert file["sha256"] == Document("text.txt", text).hash()
    assert (file["name"], file["bytes"], file["characters"]) == ("text.txt", len(TEXT.encode()), len(TEXT))
    for split, tokens in (("train", made.train), ("val", made.val)):
        (shard,) = (shard for shard in found["shards"] if shard["split"] == split)
        assert shard["tokens"] == len(tokens)
        assert shard["sha256"] == Document("x", tmp_path / "out" / shard["name"]).hash()
    assert found["format"] == data.FORMAT
    assert found["corpus"] == "text"
    assert found["spec"] == {"kind": "char"}
    assert found["tokenizer"]["kind"] == "char"
    assert found["tokenizer"]["vocab_size"] == len(set(TEXT))
    assert found["tokenizer"]["sha256"] == Document("x", tmp_path / "out" / "tokenizer.json").hash()
    assert found["split"] == {"rule": data.TEXT_SPLIT, "validation_fraction": 0.1, "train": 8181, "val": 909}
    assert found["tokens"] == {"train": len(made.train), "val": len(made.val)} == {"train": 8181, "val": 909}
    assert found["dtype"] == "uint16"


@pytest.mark.skipif(not SHARED.exists(), reason="tinyshakespeare.txt is not here; set GLASSFORMER_DATA")
def test_shakespeare_has_the_counts_of_nano_gpt(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_DATA", str(SHARED.parent))
    made = prepare("shakespeare", "char", tmp_path / "out", context=256)
    assert made.manifest.tokens == {"train": 1_003_854, "val": 111_540}
    assert made.tokenizer.vocab_size == 65
    assert made.tokenizer.decode(made.train[:14]) == "First Citizen:"


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_splits_are_exact_fractions_of_the_characters(tmp_path, fraction):
    (tmp_path / "x.txt").write_text("é" * 1000)
    made = prepare(tmp_path / "x.txt", "byte", tmp_path / "out", validation_fraction=fraction)
    assert made.manifest.split["val"] == round(1000 * fraction)
    assert len(made.val) == 2 * round(1000 * fraction)  # two bytes each, never cut in half


def test_an_alphabet_of_more_than_65536_takes_four_bytes(tmp_path):
    many = "".join(chr(i) for i in range(32, 0x12000) if not 0xD800 <= i < 0xE000)
    (tmp_path / "x.txt").write_text(many, encoding="utf-8", newline="")
    made = prepare(tmp_path / "x.txt", "char", tmp_path / "out")
    assert made.train.dtype == np.uint32
    assert made.manifest.dtype == "uint32"
    assert made.tokenizer.decode([*made.train, *made.val]) == many


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("byte", None), ("bpe", 270)])
def test_documents_of_a_folder_are_joined_without_padding(folder, tmp_path, kind, size):
    made = prepare(folder, kind, tmp_path / "out", vocab_size=size, validation_fraction=0.0)
    ends = np.flatnonzero(made.train == made.tokenizer.encode(made.manifest.separator)[0])
    assert made.manifest.separator == (tok.END if kind == "bpe" else "\n")
    parts = np.split(made.train, ends)
    assert [made.tokenizer.decode(part).strip("\n") for part in parts] == ["abc", "de", "fghij"]
    assert len(ends) == 2


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_split_anywhere_in_a_folder_loses_nothing(folder, tmp_path, cut):
    made = prepare(folder, "char", tmp_path / "out", validation_fraction=1 - cut / 10)
    train, val = (made.tokenizer.decode(tokens) for tokens in (made.train, made.val))
    assert train + val == "abc\nde\nfghij"
    assert len(train.replace("\n", "")) in (cut, cut - 1)  # 1 - cut / 10 is rounded
    assert not val.startswith("\n")


@hypothesis.given(
    st.lists(
        st.sampled_from(["word", "é", "漢", " ", "  ", "\n", "\n\n", "I'm", "9", "\r\n"]), min_size=2, max_size=50
    ),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.sampled_from(["char", "byte", "bpe"]),
)
@hypothesis.settings(max_examples=examples(40))
def test_chunks_of_reading_do_not_show_in_the_tokens(tmp_path_factory, words, chunk, fraction, kind):
    folder = tmp_path_factory.mktemp("x")
    content, size = "".join(words), 280 if kind == "bpe" else None
    (folder / "x.txt").write_text(content, encoding="utf-8", newline="")
    whole = prepare(folder / "x.txt", kind, folder / "a", vocab_size=size, validation_fraction=fraction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        parts = prepare(folder / "x.txt", whole.tokenizer, folder / "b", validation_fraction=fraction)
    assert parts.train.tolist() == whole.train.tolist()
    assert parts.val.tolist() == whole.val.tolist()


def test_a_long_bpe_corpus_is_trained_on_a_sample_and_read_whole(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text(TEXT)
    monkeypatch.setattr(corpus, "CHUNK", 1000)
    monkeypatch.setattr(build, "BPE_BYTES", 3000)
    sample = "".join(reading.stream([Document("x", tmp_path / "x.txt")], "text", every=4))
    assert len(sample) < 3000
    made = prepare(tmp_path / "x.txt", "bpe", tmp_path / "out", vocab_size=300)
    assert made.manifest.files[0]["characters"] == len(TEXT)


def test_the_embedded_corpus_can_be_prepared_and_batched(tmp_path):
    made = prepare("embedded", "char", tmp_path / "out", context=64)
    inputs, targets = Batches(made.train, 64, 12).batch(0)
    assert inputs.shape == targets.shape == (12, 64)


# made once


@pytest.fixture
def builds(monkeypatch):
    """How often something was built."""
    made, real = [], build.build

    def counted(*args):
        made.append(args)
        real(*args)

    monkeypatch.setattr(build, "build", counted)
    return made


def test_the_same_is_not_made_twice(text, tmp_path, builds):
    for _ in range(3):
        prepare(text, "char", tmp_path / "out")
    assert len(builds) == 1


@pytest.mark.parametrize(
    "change", ["text", "tokenizer", "size", "split", "train", "cut", "tokenizer.json", "format", "junk"]
)
def test_anything_else_is_made_again(text, tmp_path, builds, change):
    out = tmp_path / "out"
    settings = {"tokenizer": "bpe", "vocab_size": 300, "validation_fraction": 0.1}
    prepare(text, out=out, **settings)
    manifest = out / "manifest.json"
    match change:
        case "text":
            text.write_bytes(text.read_bytes().replace(b"quick", b"sharp"))
        case "tokenizer":
            settings |= {"tokenizer": "char", "vocab_size": None}
        case "size":
            settings["vocab_size"] = 290
        case "split":
            settings["validation_fraction"] = 0.2
        case "train":
            (out / "train-00000.bin").unlink()
        case "cut":
            os.truncate(out / "val-00000.bin", 10)
        case "tokenizer.json":
            (out / "tokenizer.json").write_text("{}")
        case "format":
            manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 0'))
        case "junk":
            manifest.write_text("{")
    made = prepare(text, out=out, **settings)
    assert len(builds) == 2
    assert made.tokenizer.decode([*made.train]) + made.tokenizer.decode([*made.val]) == text.read_text(encoding="utf-8")


def test_a_given_tokenizer_is_recognised_by_its_content(text, tmp_path, builds):
    given = train_tokenizer("char", [TEXT + "§"])
    (tmp_path / "mine.json").write_text(given.to_json(), encoding="utf-8")
    for tokenizer in (given, tmp_path / "mine.json", str(tmp_path / "mine.json")):
        made = prepare(text, tokenizer, tmp_path / "out")
        assert made.tokenizer.vocab_size == len(set(TEXT)) + 1
        assert made.manifest.spec["kind"] == "file"
        assert made.manifest.tokenizer["kind"] == "char"
    assert len(builds) == 1


def test_a_given_tokenizer_is_read_once(text, tmp_path, monkeypatch):
    file = tmp_path / "mine.json"
    file.write_text(train_tokenizer("bpe", [TEXT], 300).to_json(), encoding="utf-8")
    asked = Data(corpus=str(text), tokenizer=str(file), cache=str(tmp_path / "out"))
    first = data.prepare_corpus(asked)
    read, load = [], tok.load
    monkeypatch.setattr(tok, "load", lambda path: read.append(path) or load(path))
    again = data.prepare_corpus(asked)
    assert read == [str(file)]
    assert again.manifest == first.manifest
    assert again.tokenizer.to_json() == load(tmp_path / "out").to_json()
    recorded = data.prepare_corpus(dataclasses.replace(asked, sha256=first.digest))
    assert recorded.digest == first.digest
    other = open_prepared(tmp_path / "out", tokenizer=train_tokenizer("char", [TEXT]))  # not that of the folder
    assert other.tokenizer.kind == "bpe"


def test_what_was_prepared_opens_without_its_sources(text, tmp_path):
    made = prepare(text, "char", tmp_path / "out")
    text.unlink()
    again = open_prepared(tmp_path / "out")
    assert again.manifest.tokens == made.manifest.tokens
    assert again.tokenizer.decode(again.train[:7]) == "Line 0:"
    assert not again.train.flags.writeable


# whole or not at all


@pytest.mark.parametrize(
    ("room", "victim"), [(parts.Writer, "write"), (parts, "write_atomically"), (data, "write_atomically")]
)
def test_a_full_disk_is_a_sentence_and_leaves_no_manifest(text, tmp_path, monkeypatch, room, victim):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(room, victim, full)
        assert "No space left on device" in refusal(lambda: prepare(text, "char", tmp_path / "out"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    prepare(text, "char", tmp_path / "out")
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_a_failed_rebuild_leaves_the_old_files(text, tmp_path):
    prepare(text, "char", tmp_path / "out")
    text.write_bytes(TEXT.encode() + b"\xff")
    assert "byte 0xff" in refusal(lambda: prepare(text, "char", tmp_path / "out"))
    assert open_prepared(tmp_path / "out").manifest.tokens["train"] == 8181


CRASHES = """
import os, pathlib, sys
from glassformer.training.data import source as data

def deadly(real, calls):
    def act(*args, **settings):
        calls.append(real)
        if len(calls) == last:
            os._exit(9)
        return real(*args, **settings)
    return act

text, out = sys.argv[1:]
for last in range(1, 100):
    data.prepare(text, "char", f"{out}/{last}")
    if os.fork() == 0:
        calls = []
        for name in ("replace", "fsync", "chmod", "unlink"):
            setattr(os, name, deadly(getattr(os, name), calls))
        pathlib.Path.unlink = deadly(pathlib.Path.unlink, calls)
        data.prepare(text, "byte", f"{out}/{last}")
        os._exit(0)
    if os.wait()[1] == 0:
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked to be killed")
def test_a_crash_at_any_change_of_the_folder_leaves_the_old_the_new_or_nothing(text, tmp_path):
    """Killed at the n-th system call that changes the folder, for every n, between an old corpus and a new one."""
    subprocess.run([sys.executable, "-c", CRASHES, text, tmp_path / "out"], check=True)
    left = []
    for folder in sorted((tmp_path / "out").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            found = open_prepared(folder)
        except DataError:
            left.append("nothing")
        else:
            left.append(found.tokenizer.kind)
            assert found.tokenizer.decode(found.train) == TEXT[: int(len(TEXT) * 0.9)]
        assert prepare(text, "byte", folder).tokenizer.kind == "byte"
    assert [kind for kind, _ in itertools.groupby(left)] == ["char", "nothing", "byte"]
    assert len(left) > 10


# refusals


def test_too_short_a_validation_split_is_a_sentence(text, tmp_path):
    message = refusal(lambda: prepare(text, "char", tmp_path / "out", context=1024))
    assert "validation split of text has 909 tokens" in message
    assert "context + 1 = 1,025" in message
    assert message.endswith(
        "a longer text, a context of 908 or less (loop.context) or a larger validation fraction (data.validation)."
    )
    prepare(text, "char", tmp_path / "out", context=908)
    assert "training split" in refusal(lambda: prepare(text, "char", tmp_path / "out", context=9000))
    (tmp_path / "one.txt").write_text("x")
    message = refusal(lambda: prepare(tmp_path / "one.txt", "char", tmp_path / "short", context=8))
    assert message.endswith("use a longer text.")
    prepare(text, "char", tmp_path / "out", validation_fraction=0.0, context=9000)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, float("nan")])
def test_a_wrong_fraction_is_a_sentence(text, tmp_path, fraction):
    assert "validation_fraction=" in refusal(lambda: prepare(text, "char", tmp_path, validation_fraction=fraction))


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b"\xef\xbb\xbf", "no characters"), (b"a\0b", "NUL"), (b"\xe9", "0xe9")]
)
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_empty_and_binary_files_are_sentences(text, tmp_path, content, words, kind):
    text.write_bytes(content)
    size = 300 if kind == "bpe" else None
    if kind == "char" and words == "no characters":
        words = "at least one"
    assert words in refusal(lambda: prepare(text, kind, tmp_path / "out", vocab_size=size))


def test_an_unknown_character_has_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 10)
    (tmp_path / "x.txt").write_text("abc\n" * 30 + "ab?\n")
    message = refusal(lambda: prepare(tmp_path / "x.txt", CharTokenizer("\nabc"), tmp_path / "out"))
    assert f"'?' (U+003F) at offset 122, line 31 of {tmp_path / 'x.txt'}" in message


def test_documents_that_cannot_be_joined_are_a_sentence(folder, tmp_path):
    given = CharTokenizer("abcdefghij")
    assert "joined by a newline" in refusal(lambda: prepare(folder, given, tmp_path / "out"))


@pytest.mark.parametrize(
    ("tokenizer", "size", "words"),
    [
        ("chars", None, "tokenizer='chars' is not known. Use one of char, byte, bpe, or a tokenizer.json"),
        ("bpe", None, "257 or more"),
        ("bpe", 100, "257 or more"),
        ("char", 65, "for bpe only"),
        (CharTokenizer("ab"), 65, "has 2 ids"),
        (Path("no/tokenizer.json"), None, "cannot be read"),
    ],
)
def test_wrong_tokenizers_are_sentences(text, tmp_path, tokenizer, size, words):
    assert words in refusal(lambda: prepare(text, tokenizer, tmp_path / "out", vocab_size=size))


def test_a_corpus_is_not_prepared_into_itself(folder):
    for out in (folder, folder / "deep", folder / "new"):
        assert "would become part of it" in refusal(lambda out=out: prepare(folder, "char", out))


def test_a_text_that_changes_under_the_reader_is_a_sentence(text, tmp_path, monkeypatch):
    encode = parts._encode_text

    def changed(*args):
        text.write_text(TEXT.replace("fox", "dog"))
        return encode(*args)

    monkeypatch.setattr(parts, "_encode_text", changed)
    assert "changed while it was read" in refusal(lambda: prepare(text, "byte", tmp_path / "out"))


def test_a_folder_without_a_prepared_corpus_is_a_sentence(tmp_path):
    assert "prepare it again" in refusal(lambda: open_prepared(tmp_path))
    assert "cannot be written" in refusal(lambda: prepare("embedded", "byte", Path(__file__) / "below-a-file"))


# memory


def peak_memory(out, *files):
    """MB resident at most after each file, of a process that only prepares."""
    code = """
import sys
from glassformer.training.data.source import prepare

for file in sys.argv[2:]:
    prepare(file, "char", sys.argv[1])
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code, out, *files], capture_output=True, text=True, check=True)
    return [int(line) / 1024 for line in done.stdout.split()]


def repeated(file, size):
    block = (TEXT * 100).encode()
    with file.open("wb") as out:
        for _ in range(-(-size // len(block))):
            out.write(block)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is Linux's")
def test_memory_does_not_grow_with_the_text(tmp_path):
    repeated(tmp_path / "short.txt", 1_000_000)
    repeated(tmp_path / "long.txt", 16_000_000)
    short, long = peak_memory(tmp_path / "out", tmp_path / "short.txt", tmp_path / "long.txt")
    assert long - short < 8  # MB; the text is 15 MB longer, its tokens 30


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is Linux's")
def test_three_gigabytes_are_prepared_in_less_than_500_megabytes(tmp_path):
    repeated(tmp_path / "x.txt", 3_000_000_000)
    (peak,) = peak_memory(tmp_path / "out", tmp_path / "x.txt")
    assert peak < 500
    (tmp_path / "x.txt").unlink()
    found = open_prepared(tmp_path / "out").manifest
    assert sum(found.tokens.values()) == found.files[0]["characters"]
    assert found.files[0]["bytes"] >= 3_000_000_000
    for file in (tmp_path / "out").glob("*.bin"):
        file.unlink()  # pytest keeps its folders for a while
