"""`glass bench` as a user meets it: the table, the JSON file, exit codes, and one sentence for each mistake."""

import json
import sys
from pathlib import Path

import pytest
import torch

from glassformer.bench import processes
from tests.bench import tiny
from tests.cli.asking import run

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
FAKE = Path(__file__).parents[1] / "bench" / "fake_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("bench")).root / "hf"


@pytest.fixture
def fake_processes(monkeypatch):
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, str(FAKE)])


@pytest.mark.usefixtures("fake_processes")
def test_a_table_a_json_file_and_progress_with_them(capsys, folder, tmp_path):
    code, out, err = run(
        capsys, "bench", "decode", "--model", folder, "--against", "gpt-fast", "--precision", "float32", "--prompt", 4,
        "--new", 3, "--rounds", 2, "--json", tmp_path / "b.json", "--keep", tmp_path,
    )  # fmt: skip
    assert code == 0
    assert "glassformer-torch" in out
    assert "gpt-fast: not measured, give its checkout with --gpt-fast PATH" in out
    assert "round 2 of 2" in err
    result = json.loads((tmp_path / "b.json").read_text())
    assert result.keys() == {"command", "format", "plan", "machine", "missing", "groups", "findings"}
    assert result["plan"] | {"task": "decode", "rounds": 2, "prompt": 4, "new": 3} == result["plan"]
    row = result["groups"][0]["rows"][0]
    assert row.keys() == {
        "name", "precision", "ours", "version", "median", "low", "high", "spread", "rounds", "ratio_to_ours",
        "ratio_to_best_peer", "of_bandwidth", "disturbed", "first_token_seconds", "load_seconds", "agrees", "died",
    }  # fmt: skip
    assert row["rounds"] == [100.0, 100.0]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--against", "lama.cpp"), "'lama.cpp' is not a contender. Did you mean llama.cpp?"),
        (("--precision", "flaot32"), "'flaot32' is not a precision. Did you mean float32"),
        (("--nanogpt", "nowhere"), "nowhere is not a checkout of nanogpt"),
        (("--gpt-fast", "nowhere"), "nowhere is not a checkout of gpt-fast"),
        (("--json", "no/such/b.json"), "there is no folder"),
        (("--rounds", "0"), "--rounds 0 must be"),
        (("--training",), "--training belongs to startup, not to decode"),
        (("--precision", "float8"), "--precision float8 is for GPUs"),
        pytest.param(("--device", "cuda"), "torch finds no CUDA device", marks=WITHOUT_GPU),
        (("--model", "gtp2"), "is not a preset. Did you mean gpt2"),
        (("--prompt", "2000"), "exceed the model's context of 1024"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(capsys, flags, sentence, tmp_path):
    code, out, err = run(capsys, "bench", "decode", "--keep", tmp_path, *flags)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_growth_refuses_no_rounds_as_the_others_do(capsys):
    code, out, err = run(capsys, "bench", "growth", "--rounds", "-3")
    assert (code, out) == (2, "")
    assert "--rounds -3 must be" in err


def test_an_unknown_task_exits_2(capsys):
    assert run(capsys, "bench", "decoding")[0] == 2
