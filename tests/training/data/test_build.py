"""Token files of many parts: the same tokens in any container and with any number of processes, kept when killed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from glassformer.training.data import build, parts
from glassformer.training.data.batches import Batches
from glassformer.training.data.corpus import DataError
from glassformer.training.data.parts import is_validation
from glassformer.training.data.source import open_prepared, prepare, read_manifest
from glassformer.training.data.tokenizer import train_tokenizer

TEXTS = [f"Document {i}: naïve 漢字 – a fox.\nSecond line {i % 7}.\n" * (1 + i % 5) for i in range(60)]
SMALL = 8 * 2000
"""Bytes of a token file, so that a part has about 2,000 bytes of its source."""


def jsonl(texts=TEXTS, **more):
    return "".join(json.dumps({"id": i, "text": text, **more}) + "\n" for i, text in enumerate(texts)).encode()


def bins(folder):
    """Return the tokens of each split."""
    made = open_prepared(folder)
    return [np.asarray(tokens).tolist() for tokens in (made.train, made.val)]


def containers(folder):
    """Write the same documents in seven containers."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    data = jsonl()
    table = arrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    (folder / "a.jsonl").write_bytes(data)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))  # two members
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(data[:70]) + zstandard.compress(data[70:]))  # two frames
    parquet.write_table(table, folder / "d.parquet", row_group_size=17)
    with arrow.OSFile(str(folder / "e.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    lines = data.splitlines(keepends=True)
    (folder / "f" / "deep").mkdir(parents=True)
    (folder / "f" / "README.md").write_text("which is no data")
    (folder / "f" / "train-0.jsonl").write_bytes(b"".join(lines[:30]))
    (folder / "f" / "train-1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[30:])))
    (folder / "f" / "test-0.jsonl").write_bytes(b'{"text": "of another split"}\n')
    (folder / "g-1.jsonl").write_bytes(b"".join(lines[:50]))
    (folder / "g-2.jsonl").write_bytes(b"".join(lines[50:]))
    return ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.arrow", "f", "g-*.jsonl"]


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("bpe", 300)])
def test_the_same_documents_in_seven_containers_are_the_same_tokens(tmp_path, kind, size):
    found = []
    for number, name in enumerate(containers(tmp_path)):
        out = tmp_path / f"out-{number}"
        made = prepare(tmp_path / name, kind, out, vocab_size=size, validation_fraction=0.3, shard_bytes=SMALL)
        assert made.manifest.split["documents"] == len(TEXTS)
        found.append(bins(out))
    assert all(tokens == found[0] for tokens in found)
    end = made.tokenizer.encode(made.manifest.separator)[0]
    for tokens, side in zip(found[0], (False, True), strict=True):
        expected = [text for text in TEXTS if is_validation(text, 0.3) == side]
        pieces = [[*made.tokenizer.encode(text).tolist(), end] for text in expected]
        assert tokens == [token for piece in pieces for token in piece]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@pytest.mark.parametrize("kind", ["char", "file"])
def test_processes_and_the_size_of_parts_change_nothing(tmp_path, name, kind):
    content = "".join(TEXTS).encode() if name == "x.txt" else jsonl()
    (tmp_path / name).write_bytes(content)
    tokenizer = kind if kind == "char" else train_tokenizer("bpe", TEXTS, 300)
    one = prepare(tmp_path / name, tokenizer, tmp_path / "one")
    assert len(one.manifest.shards) == 2
    serial = prepare(tmp_path / name, tokenizer, tmp_path / "serial", shard_bytes=SMALL)
    several = prepare(tmp_path / name, tokenizer, tmp_path / "several", shard_bytes=SMALL, processes=3)
    assert bins(tmp_path / "one") == bins(tmp_path / "serial")
    assert serial.manifest.shards == several.manifest.shards
    assert serial.digest == several.digest
    assert len(serial.manifest.shards) > 5
    assert all((tmp_path / "serial" / s["name"]).stat().st_size <= SMALL for s in serial.manifest.shards)
    names = sorted(file.name for file in (tmp_path / "several").iterdir())
    assert names == sorted(["manifest.json", "tokenizer.json", *(s["name"] for s in serial.manifest.shards)])
    for shard in several.manifest.shards:
        held = (tmp_path / "several" / shard["name"]).read_bytes()
        assert held == (tmp_path / "serial" / shard["name"]).read_bytes()


@hypothesis.given(
    st.lists(st.sampled_from(["word\n", "é", "漢", " ", "\n", "\n\n", "end.\n"]), min_size=1, max_size=40),
    st.integers(20, 70),
    st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    st.integers(1, 3),
)
@hypothesis.settings(max_examples=12)
def test_any_division_of_texts_gives_the_tokens_of_one_part(tmp_path_factory, words, size, fraction, files):
    folder = tmp_path_factory.mktemp("x")
    (folder / "texts").mkdir()
    for number in range(files):
        (folder / "texts" / f"{number}.txt").write_text("".join(words[number:]) or "-", encoding="utf-8", newline="")
    settings = {"validation_fraction": fraction}
    whole = prepare(folder / "texts", "byte", folder / "a", **settings)
    divided = prepare(folder / "texts", whole.tokenizer, folder / "b", shard_bytes=8 * size, **settings)
    assert bins(folder / "a") == bins(folder / "b")
    assert divided.manifest.split | {"rule": ""} == whole.manifest.split | {"rule": ""}


def test_a_token_file_has_at_most_its_bytes_even_if_its_source_cannot_be_divided(tmp_path):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress("".join(TEXTS).encode()))
    made = prepare(tmp_path / "x.txt.gz", "byte", tmp_path / "out", shard_bytes=2000)
    assert len(made.manifest.shards) > 5
    assert all(shard["tokens"] <= 1000 for shard in made.manifest.shards)
    assert made.tokenizer.decode(made.train[:]) + made.tokenizer.decode(made.val[:]) == "".join(TEXTS)


def test_empty_documents_are_counted_and_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(jsonl(["a", "", "b"]) + b'{"text": null}\n')
    made = prepare(tmp_path / "x.jsonl", "byte", tmp_path / "out", validation_fraction=0.0)
    assert made.train.tolist() == [ord(sign) for sign in "a\nb\n"]
    assert (made.manifest.split["documents"], made.manifest.split["empty"]) == (2, 2)
    (tmp_path / "none.jsonl").write_bytes(jsonl(["", ""]))
    with pytest.raises(DataError, match="none has no characters"):
        prepare(tmp_path / "none.jsonl", "byte", tmp_path / "other")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_broken_line_of_any_part_is_reported_with_its_number(tmp_path, processes):
    lines = jsonl().splitlines(keepends=True)
    lines[50] = b'{"text": "x"\n'
    (tmp_path / "x.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"x\.jsonl, line 51, is not JSON"):
        prepare(tmp_path / "x.jsonl", "byte", tmp_path / "out", shard_bytes=SMALL, processes=processes)
    with pytest.raises(DataError, match=r"'漢' \(U\+6F22\) at offset 18, line 1 of .*x\.jsonl, line 1, is none of"):
        prepare(tmp_path / "x.jsonl", train_tokenizer("char", ["aDocument 0123456789:naïve\n"]), tmp_path / "out")


def test_an_unknown_character_of_a_late_part_has_its_line_in_the_file(tmp_path):
    lines = [f"line {i}\n" for i in range(300)]
    tokenizer = train_tokenizer("char", lines)
    lines[222] = "line §\n"
    (tmp_path / "x.txt").write_text("".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=rf"at offset {len(''.join(lines[:222])) + 5}, line 223 of .*x\.txt"):
        prepare(tmp_path / "x.txt", tokenizer, tmp_path / "out", shard_bytes=SMALL)


@pytest.mark.parametrize("mode", ["random", "epoch"])
def test_three_ranks_continue_in_many_files_what_two_began_in_one(tmp_path, mode):
    """Acceptance check A18 of training beyond one machine."""
    (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS))
    one = prepare(tmp_path / "x.jsonl", "byte", tmp_path / "one").train
    many = prepare(tmp_path / "x.jsonl", "byte", tmp_path / "many", shard_bytes=SMALL).train
    assert isinstance(one, np.ndarray)
    assert len(many.files) >= 5
    n_windows = (len(one) - 1) // 16
    steps = -(-n_windows // 6)
    rows = []
    for step in range(steps):
        world = 2 if step < steps // 2 else 3
        ranks = [Batches(many, 16, 6, 0, rank, world, mode=mode) for rank in range(world)]
        found = torch.cat([order.batch(step)[0] for order in ranks])
        assert torch.equal(found, Batches(one, 16, 6, mode=mode).batch(step)[0])
        rows += [int(offset) for order in ranks for offset in order.offsets(step)]
    if mode == "epoch":
        assert sorted(rows[:n_windows]) == [16 * i for i in range(n_windows)]


# finished parts


PREPARE = """
import sys, time
from glassformer.training.data import parts
from glassformer.training.data.source import prepare

def slow(real):
    def act(*args):
        time.sleep(0.02)
        return real(*args)
    return act

parts.Writer._finish = slow(parts.Writer._finish)
prepare(sys.argv[1], "char", sys.argv[2], shard_bytes=int(sys.argv[3]), processes=int(sys.argv[4]))
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_continues_with_what_is_finished(tmp_path, processes):
    (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS * 3))
    undisturbed = prepare(tmp_path / "x.jsonl", "char", tmp_path / "whole", shard_bytes=SMALL)
    words = [sys.executable, "-c", PREPARE, tmp_path / "x.jsonl", tmp_path / "out", str(SMALL), str(processes)]
    stage, kept = tmp_path / "out" / build.STAGE, 0
    for wanted in (1, 2, 3):
        child = subprocess.Popen(words, start_new_session=True)
        while child.poll() is None and len(list(stage.glob("[0-9a-f]*.json"))) < kept + wanted:
            time.sleep(0.002)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        records = {file.name: file.stat().st_mtime_ns for file in stage.glob("[0-9a-f]*.json")}
        kept = len(records)
        if not kept:  # it was finished already
            break
        assert read_manifest(tmp_path / "out") is None
    assert 1 <= kept < len(undisturbed.manifest.parts)
    finished = {file.name: file.stat().st_mtime_ns for file in stage.glob("[0-9a-f]*.json")}
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "encode", lambda job, real=parts.encode: made.append(job["key"]) or real(job))
        patch.setitem(parts.KINDS, "encode", lambda job, real=parts.encode: real(job))
        prepare(tmp_path / "x.jsonl", "char", tmp_path / "out", shard_bytes=SMALL)
    assert len(made) + len([name for name in finished if "tokenizer" not in name]) == len(undisturbed.manifest.parts)
    assert not any(f"{key}.json" in finished for key in made)
    assert open_prepared(tmp_path / "out").manifest.shards == undisturbed.manifest.shards
    assert not stage.exists()


def test_a_corpus_that_grows_keeps_its_parts_and_a_run_its_tokens(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "0.jsonl").write_bytes(jsonl(TEXTS[:30]))
    settings = {"tokenizer": train_tokenizer("byte", TEXTS), "out": tmp_path / "out", "shard_bytes": SMALL}
    first = prepare(tmp_path / "texts", **settings)
    before = bins(tmp_path / "out")
    (tmp_path / "texts" / "1.jsonl").write_bytes(jsonl(TEXTS[30:]))
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parts.KINDS, "encode", lambda job, real=parts.encode: made.append(job) or real(job))
        second = prepare(tmp_path / "texts", **settings)
    assert {span["name"] for job in made for span in job["spans"]} == {"1.jsonl"}
    assert len(second.train) > len(first.train)
    assert second.manifest.shards[: len(first.manifest.shards)] == first.manifest.shards
    recorded = open_prepared(tmp_path / "out", first.digest)
    assert [np.asarray(recorded.train).tolist(), np.asarray(recorded.val).tolist()] == before
    assert recorded.digest == first.digest
    with pytest.raises(DataError, match="no longer begins with the tokens"):
        open_prepared(tmp_path / "out", "0" * 64)
    fresh = prepare(tmp_path / "texts", **settings | {"out": tmp_path / "fresh"})
    assert bins(tmp_path / "fresh") == bins(tmp_path / "out")
    assert fresh.manifest.tokens == second.manifest.tokens


# sources are hashed once


def test_a_source_is_hashed_only_when_its_time_has_changed(tmp_path, monkeypatch):
    file = tmp_path / "x.txt"
    file.write_text("".join(TEXTS))
    os.utime(file, (1e9, 1e9))
    prepare(file, "byte", tmp_path / "out")
    hashed = []
    real = parts.Document.hash
    monkeypatch.setattr(parts.Document, "hash", lambda document: hashed.append(document.name) or real(document))
    prepare(file, "byte", tmp_path / "out")
    assert not hashed
    os.utime(file, (2e9, 1.5e9))
    for _ in range(3):
        prepare(file, "byte", tmp_path / "out")
    assert hashed == ["x.txt"]
    file.touch()  # just now: another change could have the same time
    for _ in range(2):
        prepare(file, "byte", tmp_path / "out")
    assert hashed == ["x.txt"] * 3


def test_token_files_of_the_first_format_still_load(tmp_path):
    """A folder with train.bin and val.bin, as version 1 wrote it."""
    file, out = tmp_path / "x.txt", tmp_path / "out"
    file.write_text("".join(TEXTS))
    made = prepare(file, "char", out)
    tokens = bins(out)
    old = json.loads((out / "manifest.json").read_text())
    for name in ("shards", "parts", "ends"):
        del old[name]
    old["format"] = 1
    del old["files"][0]["changed"]
    (out / "manifest.json").write_text(json.dumps(old))
    for split in ("train", "val"):
        (out / f"{split}-00000.bin").rename(out / f"{split}.bin")
    assert bins(out) == tokens
    again = prepare(file, "char", out)
    assert sorted(path.name for path in Path(out).iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train.bin",
        "val.bin",
    ]
    assert bins(out) == tokens
    assert again.digest == made.digest == open_prepared(out).digest
