"""`glass train` and `glass tour` as a user meets them, and one sentence for each mistake."""

import functools
import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.tour.training import Plan
from glassformer.training.session import read_run_file
from tests.cli.asking import run, run_json, settings
from tests.training import failing_sinks, tiny
from tests.training.tuning.models import character_model


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Runs link runs/latest in the working directory."""
    monkeypatch.chdir(tmp_path)


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
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.html").write_text("mine")
    code, out, err = run(capsys, "tour", "--out", tmp_path / "old")
    assert (code, out, "already holds an earlier tour" in err) == (2, "", True)
    for arguments, words in ((["--minutes", "0"], "minutes=0.0"), (["--out", tmp_path / "file"], "is a file"), below):
        code, out, err = run(capsys, "tour", *arguments)
        assert (code, out) == (2, "")
        assert words in err


def train_arguments(folder: Path, *changes: str) -> list[str]:
    where = (f'data.corpus="{tiny.corpus(folder)}"', f'data.cache="{folder / "tokens"}"', f'out="{folder / "run"}"')
    return ["train", *settings(*tiny.SMALL, *where, *changes)]


def test_train_from_a_model(capsys, tmp_path):
    model, text = character_model(tmp_path / "model"), tiny.corpus(tmp_path)
    quick = settings("loop.steps=2", "loop.batch=2", "loop.eval_batches=1", "machine.compile=no", "loop.sample_every=0")
    quick += settings(f"data.cache={tmp_path / 'tokens'}", 'optim.freeze=["embed", "block.0"]')
    code, out, err = run(capsys, "train", text, "--from", model, "--out", tmp_path / "run", *quick)
    assert code == 0, err
    assert f"fine-tuning model on {text}" in err
    total = sum(p.numel() for p in gf.load(model).parameters())
    frozen = sum(p.numel() for n, p in gf.load(model).named_parameters() if n.startswith(("embed", "decoder.blocks.0")))
    assert f"{frozen:,} parameters are frozen; {total - frozen:,} are trained." in err
    assert "the head is tied to the token table" in err
    assert run(capsys, "convert", tmp_path / "run" / "best", tmp_path / "hf", "--to", "hf")[0] == 0
    code, out, err = run(capsys, "train", "--from", model, "--resume", tmp_path / "run")
    assert (code, out) == (2, "")
    assert "--resume continues a run and --from starts a new one" in err
    code, out, err = run(capsys, "train", text, "--from", model, *settings("model.d_model=32"))
    assert (code, out) == (2, "")
    assert "model.d_model=32 contradicts start.model" in err


def test_train_then_sample_then_resume(capsys, tmp_path):
    code, out, _ = run(capsys, *train_arguments(tmp_path, "loop.sample_every=10"))
    assert code == 0
    assert ", cpu, float32, torch\n" in out
    assert "baselines (nats per token):  uniform" in out
    assert "done: 20 steps" in out
    result = out.strip().splitlines()[-1]
    _, _, command = result.partition(": glass ")
    assert run(capsys, *shlex.split(command), "--max-new-tokens", "8")[0] == 0  # what it says to type runs as it stands
    code, out, _ = run(capsys, "sample", "--model", tmp_path / "run" / "best", "the cat", "--max-new-tokens", "8")
    assert code == 0
    assert out.startswith("the cat")
    code, out, err = run(capsys, "train", "--resume", tmp_path / "run")
    assert code == 2
    assert "the run is finished (20 of 20 steps): go further with --set loop.steps=N" in err
    code, out, _ = run(capsys, "train", "--resume", tmp_path / "run", "--set", "loop.steps=25", "--json")
    assert code == 0
    start, *_, end = map(json.loads, out.strip().splitlines())
    assert (start["device"], start["precision"], start["implementation"]) == ("cpu", "float32", "torch")
    assert end["event"] == "end"


def small(folder: Path, *changes: str) -> list[str]:
    return settings(*tiny.SMALL, f'data.cache="{folder / "tokens"}"', *changes)


def test_a_text_is_trained_on_with_the_defaults_and_latest_follows_every_run(capsys, tmp_path):
    text = tiny.corpus(tmp_path)
    code, out, err = run(capsys, "train", text, *small(tmp_path, "loop.steps=6"))
    assert code == 0
    (line,) = err.splitlines()
    assert f"training on {text} without a run file, with the default settings: 2 layers of width 24" in line
    assert "the char tokenizer, 6 steps" in line
    assert line.endswith("the run is in runs/corpus-1.")
    assert "run folder: runs/corpus-1\n" in out
    assert os.readlink("runs/latest") == "corpus-1"
    assert not any(line.endswith(" ") for line in out.splitlines())

    folder = tmp_path / "texts"  # a folder of texts is a corpus too, and another file name decides nothing
    folder.mkdir()
    text.rename(folder / "corpus.md")
    code, *_ = run(capsys, "train", folder, "--out", tmp_path / "else where", *small(tmp_path, "loop.steps=6"))
    assert code == 0
    assert Path("runs/latest").resolve() == tmp_path / "else where"
    assert run(capsys, "sample", "--model", "runs/latest/best", "the", "--max-new-tokens", "4")[0] == 0

    code, out, _ = run(capsys, "train", "--resume", "runs/latest", "--set", "loop.steps=7", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[0])["out"] == str(tmp_path / "else where")
    assert sorted(os.listdir("runs")) == ["corpus-1", "latest"]
    code, *_ = run(capsys, "train", folder, *small(tmp_path, "loop.steps=6"), "--no-latest")
    assert (code, Path("runs/latest").resolve()) == (0, tmp_path / "else where")


def test_a_folder_that_holds_a_run_is_replaced_only_with_force(capsys, tmp_path):
    arguments = train_arguments(tmp_path, "loop.steps=6")
    assert run(capsys, *arguments)[0] == 0
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "already holds a run (step-00000006)" in err
    assert "--force" in err
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    assert run(capsys, *arguments, "--set", "seed=1", "--force")[0] == 0
    assert (tmp_path / "run" / "log.jsonl").read_bytes() != log


def test_only_steps_given_shortens_the_warm_up_in_one_line(capsys, tmp_path):
    changes = [word for word in train_arguments(tmp_path, "loop.steps=4")[1:] if "=" in word]
    arguments = ["train", *settings(*(change for change in changes if not change.startswith("schedule")))]
    code, _, err = run(capsys, *arguments)
    assert code == 0
    assert err.startswith("note: schedule.warmup is shortened from 100 to 0, a tenth of loop.steps=4")
    assert len(err.splitlines()) == 1


def test_fields_are_printed_as_the_page_of_the_docs(capsys):
    page = Path(__file__).parents[2] / "docs" / "run_file.md"
    assert run(capsys, "train", "--fields") == (0, page.read_text(encoding="utf-8"), "")
    code, found = run_json(capsys, "train", "--fields")
    assert code == 0
    assert "optim.lr" in {field["name"] for section in found["sections"] for field in section["fields"]}


@pytest.mark.parametrize(
    ("name", "data", "is_run"),
    [
        ("r.toml", b"not = = toml", True),
        ("r.TOML", b"", True),
        ("run.cfg", b"seed = 3\n[loop]\nsteps = 5\n", True),
        ("t.txt", b"", False),
        ("t.txt", b"title = 'a text that is TOML by accident'\n", False),
        ("t", b"[Enter GREMIO]\nGood morrow\n", False),
        ("t.bin", b"\xff\xfe\x00", False),
    ],
)
def test_a_run_file_is_distinguished_from_a_text_by_suffix_and_content(tmp_path, name, data, is_run):
    assert (read_run_file(written(tmp_path, name, data)) is not None) == is_run


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
    command = err.strip().removeprefix("stopped; continue with: glass ")
    monkeypatch.setattr(loop, "train_step", step)
    code, out, _ = run(capsys, *shlex.split(command))
    assert code == 0
    assert "done: 20 steps" in out


def test_resume_auto_starts_continues_and_ends(capsys, monkeypatch, tmp_path):
    words = [*train_arguments(tmp_path), "--resume", "auto"]
    code, out, _ = run(capsys, *words, *settings("loop.steps=12"))
    assert code == 0
    assert "done: 12 steps" in out
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "done: 20 steps" in out
    assert "step      1 " not in out
    code, out, err = run(capsys, *words)
    assert (code, out) == (0, "")
    assert "is finished; go further with --set loop.steps=N" in err
    code, _, err = run(capsys, *words, *settings("seed=7", "model.d_model=48"))
    assert code == 2
    assert "holds another run, which differs in model, seed" in err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a restart must not begin again, not even with --force
    code, out, err = run(capsys, *words[:-2], "--force")
    assert (code, out) == (0, "")
    assert "is finished" in err


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def training(f: Path, *changes: object) -> list[object]:
    return ["train", *settings(f'out="{f / "out"}"', f'data.cache="{f / "tokens"}"', *changes)]


def run_like(folder: Path) -> Path:
    (folder / "checkpoints").mkdir()
    written(folder, "run.toml", b"seed = 1")
    return folder


BAD_RUNS = {
    "unknown key": (lambda f: ["train", written(f, "r.toml", b"[loop]\nstep = 3")], "Did you mean steps"),
    "no such run file": (lambda f: ["train", f / "none.toml"], "does not exist: give a run file, a text file or"),
    "no such text file": (lambda f: ["train", f / "none.txt"], "does not exist: give a run file, a text file or"),
    "broken TOML": (lambda f: ["train", written(f, "r.toml", b"a = = 3")], "r.toml is not readable TOML"),
    "binary TOML": (lambda f: ["train", written(f, "r.toml", b"\xff\xfe")], "r.toml is not TOML: byte 0"),
    "binary file": (lambda f: ["train", written(f, "m.bin", bytes(range(256)))], "m.bin is not a text"),
    "other encoding": (lambda f: ["train", written(f, "l.txt", "é".encode("latin-1") * 9)], "l.txt is not UTF-8 text"),
    "empty file": (lambda f: ["train", written(f, "e.txt", b"")], "e.txt is empty"),
    "auto nowhere": (lambda f: ["train", "--resume", "auto"], "names none: add --out FOLDER"),
    "two texts": (lambda f: ["train", written(f, "a.txt", b"a"), "--set", "data.corpus=b.txt"], "leave one of them"),
    "two folders": (lambda f: ["train", "--out", f / "a", "--set", "out=b"], "name the folder twice"),
    "a run's folder": (lambda f: ["train", run_like(f)], "is the folder of a run: continue it with --resume"),
    "resume and force": (lambda f: ["train", "--resume", f, "--force"], "leave one of them out"),
    "steps and warm-up": (
        lambda f: training(f, "loop.steps=10", "schedule.warmup=10"),
        "schedule.warmup=10 leaves nothing of loop.steps=10",
    ),
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


def test_events_go_to_loggers_and_can_be_replayed(capsys, tmp_path):
    logger = "tests.training.failing_sinks:Remembering"
    failing_sinks.received.clear()
    code, out, _ = run(capsys, *train_arguments(tmp_path, "loop.steps=4"), "--log-to", logger)
    assert code == 0
    live = [event for kind, event in failing_sinks.received if kind == "log"]
    assert live[-1]["event"] == "end"
    failing_sinks.received.clear()
    code, found = run_json(capsys, "train", "--replay", tmp_path / "run", "--log-to", logger)
    assert (code, found["events"]) == (0, len(live))
    assert [event for kind, event in failing_sinks.received if kind == "log"] == live
    code, out, _ = run(capsys, "train", "--replay", tmp_path / "run", "--log-to", logger)
    assert f"sent {len(live)} events" in out


def test_a_logger_that_fails_is_reported_in_one_line(capsys, tmp_path):
    logger = "tests.training.failing_sinks:RaisingInLog"
    code, out, err = run(capsys, *train_arguments(tmp_path, "loop.steps=4"), "--log-to", logger)
    assert code == 0, err
    assert f"note: the logger {logger} is switched off (no connection); log.jsonl is complete" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--replay", "run"], "--replay run needs the loggers: add --log-to"),
        (["--replay", "run", "--log-to", "wandb"], "--replay run is not the folder of a run"),
        (["--replay", "run", "--log-to", "wandb", "--force"], "with --replay has no use for --force"),
        (["--replay", "run", "text.txt"], "with --replay has no use for a run file"),
        (["--log-to", "wanb"], "'wanb', which is not a logger; a class is package.module:Class. Did you mean wandb"),
        (["--log-to", "wandb", "--set", 'loop.sinks=["mlflow"]'], "name the loggers twice"),
    ],
)
def test_wrong_loggers_are_one_sentence(capsys, words, sentence):
    code, out, err = run(capsys, "train", *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_train_adapters_and_use_them(capsys, tmp_path):
    """--lora, then --adapter of sample, look, doctor and convert."""
    model, text = character_model(tmp_path / "model", activation="gelu_tanh"), tiny.corpus(tmp_path)
    quick = settings("loop.steps=2", "loop.batch=2", "loop.eval_batches=1", "machine.compile=no", "optim.lr=0.05")
    quick += settings(f"data.cache={tmp_path / 'tokens'}", "loop.sample_every=2")
    code, out, err = run(capsys, "train", text, "--from", model, "--lora", "2", "--out", tmp_path / "run", *quick)
    assert code == 0, err
    adapter = tmp_path / "run" / "last"
    chosen = ("--max-new-tokens", "6", "--temperature", "0", "--engine", "torch")
    both = run(capsys, "sample", "the", "--model", model, "--adapter", adapter, *chosen)
    assert both[0] == 0
    assert run(capsys, "sample", "the", "--model", adapter, *chosen)[1] == both[1]
    code, numbers = run_json(capsys, "look", "heads", "--model", model, "--adapter", adapter)
    assert code == 0
    assert numbers != run_json(capsys, "look", "heads", "--model", model)[1]
    code, report = run_json(capsys, "doctor", model, "--adapter", adapter, "--quick")
    assert code in (0, 1)
    assert "with the adapter" in json.dumps(report)
    for to, name in (("glass", "glass"), ("hf", "hf"), ("peft", "peft"), ("gguf", "model.gguf")):
        code, out, err = run(capsys, "convert", model, tmp_path / name, "--adapter", adapter, "--to", to)
        assert code == 0, err
    merged = gf.load(adapter).state_dict()
    for name in ("glass", "hf", "peft"):
        found = gf.load(model, adapter=tmp_path / name) if name == "peft" else gf.load(tmp_path / name)
        assert all(torch.allclose(found.state_dict()[key], merged[key], atol=1e-7) for key in merged)
    code, out, err = run(capsys, "train", "--lora", "4", "--resume", tmp_path / "run")
    assert (code, "leave out --lora" in err) == (2, True)
    code, out, err = run(capsys, "train", text, "--lora", "4")
    assert (code, "adapts an existing model" in err) == (2, True)
    code, out, err = run(capsys, "sample", "x", "--model", "bard", "--adapter", adapter)
    assert (code, out) == (2, "")
    assert "it belongs to another model" in err
