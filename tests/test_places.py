"""The package works where it may write nothing outside the current folder, without a compiler and without a display."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PLACES = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), os.devnull)
"""Folders that cannot be made: also root cannot write below a device."""


def run(folder, *words):
    environment = {**PLACES, "PATH": str(folder / "nothing"), "PYTHONPATH": str(SOURCE)}  # no DISPLAY, no compiler
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def test_import(tmp_path):
    done = run(tmp_path, "-c", "import glassformer; print(glassformer.__version__)")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_answer_is_judged_although_the_progress_cannot_be_kept(tmp_path):
    done = run(tmp_path, "-m", "glassformer", "course", "answer", "self-weight", "e^4/(e^4+21)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right: Right.\n"
    assert "the progress is not kept" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "sample ROMEO: --max-new-tokens 40",
        "look attention --text lord --out a.svg",
        "look attention --text lord --out a.png",
        "check permutation-equivariance",
        "env",
        "doctor bard --quick",
        "exercise",
    ],
)
def test_commands(tmp_path, command):
    done = run(tmp_path, "-m", "glassformer", *command.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_training(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    steps = [
        word for field in ("steps=4", "batch=2", "context=16", "eval_batches=1") for word in ("--set", f"loop.{field}")
    ]
    done = run(tmp_path, "-m", "glassformer", "train", "text.txt", *steps)
    assert done.returncode == 0, done.stderr
    assert "done: 4 steps" in done.stdout
