"""`glass train` and `glass tour` as a user meets them, and one sentence for each mistake."""

import functools
import json
import shlex
import signal
from pathlib import Path

import pytest
import torch

from glassformer import cli
from glassformer.cli import gathered, main, options_of_several
from glassformer.cli.training import _prompt
from glassformer.tour.training import Plan
from tests.cli.asking import run, run_json
from tests.training import tiny


@pytest.mark.slow
def test_tour_as_json(capsys, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and again.\n" * 200)
    small = ("model.n_layers=1", "model.d_model=32", "model.attention.n_heads=2", "model.feedforward.d_ff=64")
    small = (*small, "loop.eval_batches=2", "model.max_len=48")
    changes = (*small, f"data.corpus={text}", f"data.cache={tmp_path / 'tokens'}")
    monkeypatch.setattr("glassformer.tour.run.Plan", functools.partial(Plan, cache_lengths=(8,), changes=changes))
    code, result = run_json(capsys, "tour", "--minutes", "0.01", "--out", tmp_path / "tour")
    assert code == 0
    assert not any(f["verdict"] == "fail" for f in result["findings"])
    assert all(timing["same_tokens"] for timing in result["cache"])
    assert Path(result["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_tour_refuses_what_it_cannot_do(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    below = (["--out", tmp_path / "file" / "x"], "cannot be written (Not a directory): give another folder")
    for arguments, words in ((["--minutes", "0"], "minutes=0.0"), (["--out", tmp_path / "file"], "is a file"), below):
        code, out, err = run(capsys, "tour", *arguments)
        assert (code, out) == (2, "")
        assert words in err


def train_arguments(folder: Path, *changes: str) -> list[str]:
    where = (f'data.corpus="{tiny.corpus(folder)}"', f'data.cache="{folder / "tokens"}"', f'out="{folder / "run"}"')
    return ["train", "--set", *tiny.SMALL, *where, *changes]


def test_train_then_sample_then_resume(capsys, tmp_path):
    code, out, _ = run(capsys, *train_arguments(tmp_path, "loop.sample_every=10"))
    assert code == 0
    assert "baselines (nats per token):  uniform" in out
    assert "done: 20 steps" in out
    told = out.strip().splitlines()[-1]
    _, _, command = told.partition(": glass ")
    assert run(capsys, *shlex.split(command), "--max-new-tokens", "8")[0] == 0  # what it says to type runs as it stands
    code, out, _ = run(capsys, "sample", "--model", tmp_path / "run" / "best", "the cat", "--max-new-tokens", "8")
    assert code == 0
    assert out.startswith("the cat")
    code, out, err = run(capsys, "train", "--resume", tmp_path / "run")
    assert code == 2
    assert "the run is finished (20 of 20 steps): go further with --set loop.steps=N" in err
    code, out, _ = run(capsys, "train", "--resume", tmp_path / "run", "--set", "loop.steps=25", "--json")
    assert code == 0
    assert json.loads(out.strip().splitlines()[-1])["event"] == "end"


def test_the_prompt_that_is_proposed_is_a_word_where_the_text_has_one():
    assert _prompt("?\n\nGREMIO:\nGood morrow") == "GREMIO:"
    assert _prompt("12 + 3 = 15") == "12"
    assert _prompt(" \n") == ""


def test_an_interrupted_run_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    from glassformer.training import loop

    step, calls = loop.train_step, []

    def interrupted(*given, **named):
        calls.append(1)
        if len(calls) == 12:
            signal.raise_signal(signal.SIGINT)
        return step(*given, **named)

    monkeypatch.setattr(loop, "train_step", interrupted)
    code, _, err = run(capsys, *train_arguments(tmp_path))
    assert code == 130
    command = err.strip().removeprefix("stopped; glass ").removesuffix(" goes on from here")
    monkeypatch.setattr(loop, "train_step", step)
    code, out, _ = run(capsys, *shlex.split(command))
    assert code == 0
    assert "done: 20 steps" in out


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def training(f: Path, *changes: object) -> list[object]:
    return ["train", "--set", f'out="{f / "out"}"', f'data.cache="{f / "tokens"}"', *changes]


BAD_RUNS = {
    "unknown key": (lambda f: ["train", written(f, "r.toml", b"[loop]\nstep = 3")], "Did you mean steps"),
    "no such run file": (lambda f: ["train", f / "none.toml"], "does not exist"),
    "empty text": (lambda f: training(f, f'data.corpus="{written(f, "e.txt", b"")}"'), "e.txt"),
    "binary text": (lambda f: training(f, f'data.corpus="{written(f, "b.txt", bytes(range(256)))}"'), "b.txt"),
    "short text": (lambda f: training(f, f'data.corpus="{written(f, "s.txt", b"abc " * 50)}"'), "validation"),
    "no such text": (lambda f: training(f, "data.corpus=nowhere.txt"), "nowhere.txt"),
    "no checkpoint": (lambda f: ["train", "--resume", f], "holds no checkpoint"),
    "run and resume": (lambda f: ["train", f / "r.toml", "--resume", f], "leave out"),
    "no CUDA": (lambda f: training(f, f'data.corpus="{tiny.corpus(f)}"', "machine.device=cuda"), "no CUDA device"),
}


@pytest.mark.parametrize("mistake", BAD_RUNS)
def test_each_bad_run_gets_one_sentence_and_exit_2(capsys, tmp_path, mistake):
    if mistake == "no CUDA" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    arguments, words = BAD_RUNS[mistake]
    code, _, err = run(capsys, *arguments(tmp_path))
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1, err


def test_an_option_given_twice_keeps_both_values(capsys):
    """The parser alone would forget the first, and train with the recipe's rate."""
    assert main(["train", "--set", "optim.lr=-1", "--set", "optim.warp=1"]) == 2
    assert "optim.warp" in capsys.readouterr().err
    assert main(["train", "--set", "optim.lr=-1", "--set", "loop.steps=1"]) == 2
    assert "optim.lr=-1.0 must be positive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("train r.toml --set a=1 --set b=2 c=3 --json", "train r.toml --set a=1 b=2 c=3 --json"),
        ("train --set a=1 --json --set=b=2", "train --set a=1 b=2 --json"),
        ("bench decode --against x --rounds 1 --against y", "bench decode --against x y --rounds 1"),
        ("train --resume a --resume b", "train --resume a --resume b"),
    ],
)
def test_values_are_gathered_where_an_option_stands_first(told, wanted):
    assert gathered(told.split(), ["--set", "--against"]) == wanted.split()


def test_which_options_take_several_values_is_read_off_the_verbs():
    found = {verb: options for verb, function in cli._verbs().items() if (options := options_of_several(function))}
    assert found == {
        "train": ["--set"],
        "sample": ["--stop"],
        "check": ["--names"],  # which nobody can give by that name
        "doctor": ["--expect"],
        "compare": ["--tokens"],
        "bench": ["--against", "--precision"],
        "serve": ["--model"],
    }
