"""The command line as a user meets it: what it prints, its exit codes, and one sentence for each mistake."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.tour import Plan
from tests import folders
from tests.train import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("model") / "tiny")


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert len(out.strip().splitlines()) == 1
    return code, json.loads(out)


def test_size_of_a_preset(capsys):
    code, out, _ = run(capsys, "size", "gpt2")
    assert code == 0
    assert "124,439,808" in out
    code, sheet = run_json(capsys, "size", "gpt2", "--batch", "2", "--context", "64")
    assert code == 0
    assert "124439808" in json.dumps(sheet)


def test_size_of_a_folder_and_of_a_file(capsys, folder):
    _, by_folder = run_json(capsys, "size", folder)
    _, by_file = run_json(capsys, "size", folder / "model.toml")
    assert by_folder == by_file


def test_size_chinchilla_and_jl(capsys):
    code, out, _ = run(capsys, "size", "chinchilla", "--flops", "1.2e24")
    assert code == 0
    assert "rule D = 20·N                   1e+11        2e+12     20.0" in out
    code, result = run_json(capsys, "size", "chinchilla", "--flops", "1.2e24")
    assert "100000000000.0" in json.dumps(result)
    code, out, _ = run(capsys, "size", "jl", "--points", "1e12", "--eps", "0.1")
    assert code == 0
    assert "22,105" in out


def test_sample_continues_the_prompt_and_repeats_itself(capsys, folder):
    first = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20")
    assert first[0] == 0
    assert first[1].startswith("the cat")
    assert run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20") == first
    other = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--seed", "1")
    assert other[1] != first[1]
    uncached = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--no-cache")
    assert uncached[1] == first[1]


def test_the_bundled_bard_speaks_without_a_word_about_models(capsys):
    code, out, _ = run(capsys, "sample", "ROMEO:", "--max-new-tokens", "40")
    assert code == 0
    assert out.startswith("ROMEO:")
    assert len(out) > 40


def test_sample_as_json_by_beams_and_by_ids(capsys, folder):
    code, result = run_json(capsys, "sample", "--model", folder, "--beams", "3", "the", "--max-new-tokens", "5")
    assert code == 0
    assert len(result["new_tokens"]) == 5
    code, result = run_json(capsys, "sample", "--model", folder, "--ids", "5 6", "--max-new-tokens", "5")
    assert code == 0
    assert result["prompt_tokens"] == [5, 6]


def test_convert_there_and_back(capsys, folder, tmp_path):
    code, out, _ = run(capsys, "convert", folder, tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "pass" in out
    code, result = run_json(capsys, "convert", tmp_path / "hf", tmp_path / "back", "--to", "glass")
    assert code == 0
    assert result["findings"][0]["measured"] == 0.0
    ours, back = gf.load(folder).state_dict(), gf.load(tmp_path / "back").state_dict()
    assert all(torch.equal(ours[name], back[name]) for name in ours)
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_env_gives_its_reason(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert "GFLOP/s in float32" in out
    code, facts = run_json(capsys, "env")
    assert facts["dtype"] in ("float32", "bfloat16")
    assert facts["versions"]["torch"].startswith("2.")


def test_tour_as_json(capsys, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and again.\n" * 200)
    small = ("model.n_layers=1", "model.d_model=32", "model.attention.n_heads=2", "model.feedforward.d_ff=64")
    small = (*small, "loop.eval_batches=2", "model.max_len=48")
    changes = (*small, f"data.corpus={text}", f"data.cache={tmp_path / 'tokens'}")
    monkeypatch.setattr("glassformer.tour.Plan", functools.partial(Plan, races=(8,), changes=changes))
    code, result = run_json(capsys, "tour", "--minutes", "0.01", "--out", tmp_path / "tour")
    assert code == 0
    assert not any(f["verdict"] == "fail" for f in result["findings"])
    assert all(race["same_tokens"] for race in result["cache"])
    assert Path(result["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_tour_refuses_what_it_cannot_do(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, words in ((["--minutes", "0"], "minutes=0.0"), (["--out", tmp_path / "file"], "is a file")):
        code, out, err = run(capsys, "tour", *arguments)
        assert (code, out) == (2, "")
        assert words in err


def train_arguments(folder: Path, *changes: str) -> list[str]:
    where = (f'data.corpus="{tiny.corpus(folder)}"', f'data.cache="{folder / "tokens"}"', f'out="{folder / "run"}"')
    return ["train", "--set", *tiny.SMALL, *where, *changes]


def test_train_then_sample_then_resume(capsys, tmp_path):
    code, out, _ = run(capsys, *train_arguments(tmp_path, "loop.sample_every=10"))
    assert code == 0
    assert "to beat (nats per token):  uniform" in out
    assert "done: 20 steps" in out
    code, out, _ = run(capsys, "sample", "--model", tmp_path / "run" / "best", "the cat", "--max-new-tokens", "8")
    assert code == 0
    assert out.startswith("the cat")
    code, out, err = run(capsys, "train", "--resume", tmp_path / "run")
    assert code == 2
    assert "the run is finished (20 of 20 steps): go further with --set loop.steps=N" in err
    code, out, _ = run(capsys, "train", "--resume", tmp_path / "run", "--set", "loop.steps=25", "--json")
    assert code == 0
    assert json.loads(out.strip().splitlines()[-1])["event"] == "end"


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


def truncated(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def pickled(folder: Path) -> Path:
    torch.save({"x": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def hf(folder: Path, **changes) -> Path:
    """The same model as a Hugging Face folder with a spoilt config.json."""
    target = folder.parent / "spoilt"
    gf.save(gf.load(folder), target, format="hf")
    data = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**data, **changes}))
    return target


def bad_toml(folder: Path) -> Path:
    (folder / "bad.toml").write_text("a = = 3")
    return folder / "bad.toml"


MISTAKES = {
    "an unknown character": (lambda f: ["sample", "ROMEO: ½"], "'½' (U+00BD), which is not one of the 65 tokens"),
    "no such folder": (lambda f: ["sample", "--model", f / "nowhere", "hi"], "nowhere"),
    "missing weights": (lambda f: ["sample", "--model", without(f, "model.safetensors"), "hi"], "safetensors"),
    "truncated weights": (lambda f: ["sample", "--model", truncated(f), "hi"], "model.safetensors"),
    "a pickle": (lambda f: ["sample", "--model", pickled(f), "hi"], "pickle"),
    "unknown architecture": (lambda f: ["sample", "--model", hf(f, model_type="mamba"), "hi"], "mamba"),
    "heads not dividing": (lambda f: ["sample", "--model", hf(f, num_key_value_heads=3), "hi"], "3"),
    "vocabulary mismatch": (lambda f: ["sample", "--model", hf(f, vocab_size=299), "hi"], "299"),
    "ids out of range": (lambda f: ["sample", "--model", f, "--ids", "5 300"], "token id 300"),
    "not ids": (lambda f: ["sample", "--model", f, "--ids", "five"], "token ids"),
    "empty prompt": (lambda f: ["sample", "--model", f, ""], "empty"),
    "prompt too long": (lambda f: ["sample", "--model", f, "--ids", "1 " * 64], "fills the context of 64"),
    "no room": (lambda f: ["sample", "--model", f, "--ids", "1 " * 10, "--max-new-tokens", "99"], "54 new tokens"),
    "top-p of 0": (lambda f: ["sample", "--model", f, "hi", "--top-p", "0"], "top_p=0.0 must be in (0, 1]"),
    "top-p of 1.5": (lambda f: ["sample", "--model", f, "hi", "--top-p", "1.5"], "top_p=1.5"),
    "negative temperature": (lambda f: ["sample", "--model", f, "hi", "--temperature", "-1"], "temperature=-1.0"),
    "unknown preset": (lambda f: ["size", "gtp2"], "gpt2"),
    "unreadable TOML": (lambda f: ["size", bad_toml(f)], "not readable TOML"),
    "no such file": (lambda f: ["size", "nowhere/model.toml"], "does not exist"),
    "jl without points": (lambda f: ["size", "jl"], "--points"),
    "jl with eps 2": (lambda f: ["size", "jl", "--points", "10", "--eps", "2"], "eps"),
    "chinchilla without budget": (lambda f: ["size", "chinchilla"], "flops"),
    "occupied target": (lambda f: ["convert", f, Path(__file__).parent], "not a model folder"),
    "unknown dtype": (lambda f: ["sample", "--model", f, "hi", "--dtype", "float8"], "float8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_gets_one_sentence_and_exit_2(capsys, folder, tmp_path, mistake):
    own = shutil.copytree(folder, tmp_path / "tiny")
    arguments, words = MISTAKES[mistake]
    code, out, err = run(capsys, *arguments(own))
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err


def test_wrong_usage_is_exit_2(capsys):
    assert run(capsys, "paint")[0] == 2
    assert run(capsys, "size")[0] == 2
    assert run(capsys, "size", "gpt2", "--batch", "many")[0] == 2


def test_module_and_broken_pipe():
    """`python -m glassformer` is `glass`, and a reader that leaves early is no error."""
    command = f"{sys.executable} -m glassformer size gpt2 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
