"""`glass data prepare` as a user meets it."""

import json

import pytest

from glassformer.training.data.source import open_prepared
from tests.cli.asking import run, run_json, settings
from tests.training import tiny


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = tiny.corpus(tmp_path).read_text().split("\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in [*words, ""]))
    return tmp_path


def test_a_corpus_is_prepared_described_and_trained_on(rows, capsys):
    code, out, err = run(
        capsys, "data", "prepare", "rows.jsonl", "--field", "body", "--out", "tokens", "--processes", "1"
    )
    assert (code, err) == (0, "")
    made = open_prepared("tokens")
    first, second, third = out.splitlines()
    assert first == (
        f"tokens: {len(made.train):,} tokens for training and {len(made.val):,} for validation in 2 files (uint16); "
        f"the char tokenizer has {made.tokenizer.vocab_size} ids"
    )
    count = made.manifest.split["documents"]
    assert second == f"{count:,} documents of 1 file; 1 more had no text and were left out"
    assert third == "train on it: glass train tokens"
    code, facts = run_json(capsys, "data", "prepare", "rows.jsonl", "--field", "body", "--out", "tokens")
    assert code == 0
    assert facts["sha256"] == made.digest
    assert facts["tokens"] == made.manifest.tokens
    (rows / "rows.jsonl").unlink()  # the folder is enough
    code, out, err = run(capsys, "train", "tokens", "--out", "run", *settings(*tiny.SMALL, "loop.steps=4"))
    assert code == 0, err
    assert "the char tokenizer" in err
    assert made.digest in (rows / "run" / "run.toml").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("rows.jsonl",),
            "rows.jsonl, line 1, has no field 'text'; its fields are body. Set data.field to one of them.",
        ),
        (("none.jsonl",), "the corpus 'none.jsonl' does not exist. Give a text, JSONL or Parquet file"),
        (("rows.jsonl", "--processes", "0"), "--processes 0 must be a whole number of at least 1."),
        (("rows.jsonl", "--shard-mib", "0"), "--shard-mib 0 must be a whole number of at least 1."),
        (("rows.jsonl", "--validation", "1"), "data.validation=1.0 must be between 0 and 1."),
        (("rows.jsonl", "--out", "corpus.txt"), "--out corpus.txt is a file: give a folder."),
        (("rows.jsonl", "--out", "full"), "--out full is not empty and has no manifest.json: give another folder."),
        (("*.jsonl", "--tokenizer", "bpe"), "vocab_size=None is too small for bpe"),
        (("*", "--field", "body"), "the pattern '*' matches data files and corpus.txt, which is a text"),
        (("no-match*",), "the corpus 'no-match*' does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(rows, capsys, words, sentence):
    (rows / "full").mkdir()
    (rows / "full" / "file").write_text("of somebody")
    code, out, err = run(capsys, "data", "prepare", *words, *(() if "--out" in words else ("--out", "tokens")))
    assert (code, out) == (2, "")
    assert err.startswith("glass: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_other_settings_replace_a_corpus_only_with_force(rows, capsys):
    asked = ("data", "prepare", "rows.jsonl", "--field", "body", "--out", "tokens")
    assert run(capsys, *asked)[0] == 0
    before = open_prepared("tokens").digest
    code, _, err = run(capsys, *asked, "--tokenizer", "byte")
    assert code == 2
    assert "prepared with tokenizer=char, not byte: give another folder, or replace it with --force." in err
    assert open_prepared("tokens").digest == before
    assert run(capsys, *asked, "--tokenizer", "byte", "--force")[0] == 0
    assert open_prepared("tokens").tokenizer.kind == "byte"


def test_without_a_folder_the_tokens_are_where_training_looks(rows, capsys, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(rows / "cache"))
    code, facts = run_json(capsys, "data", "prepare", "corpus.txt")
    assert code == 0
    assert facts["folder"].startswith(str(rows / "cache" / "tokens" / "corpus-"))
    code, _, err = run(capsys, "train", "corpus.txt", "--out", "run", *settings(*tiny.SMALL, "loop.steps=4"))
    assert code == 0, err
    assert len([folder for folder in (rows / "cache" / "tokens").iterdir() if folder.is_dir()]) == 1


def test_training_takes_a_pattern(rows, capsys):
    asked = (*tiny.SMALL, "loop.steps=4", "data.field=body", "data.cache=tokens")
    code, _, err = run(capsys, "train", "r*.jsonl", "--out", "run", *settings(*asked))
    assert code == 0, err
    assert open_prepared("tokens").manifest.split["documents"] > 100
    code, _, err = run(capsys, "train", "none*.jsonl", "--out", "other", *settings(*asked))
    assert code == 2
    assert "the corpus 'none*.jsonl' does not exist" in err


@pytest.mark.parametrize(("name", "module"), [("x.jsonl.zst", "zstandard"), ("x.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_its_extra(rows, capsys, monkeypatch, name, module):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    (rows / name).write_bytes(b"x")
    code, _, err = run(capsys, "data", "prepare", name, "--out", "tokens", "--processes", "1")
    assert code == 2
    assert f"needs the package {module}: run pip install" in err
    assert err.count("\n") == 1
