"""llama.cpp runs in a process of its own, and whatever happens to it is one sentence."""

import subprocess
import sys

import pytest

import glassformer as gf
from glassformer.weights.formats.gguf import check, llama
from tests.weights.formats.gguf.models import CASES, NEEDS_LLAMA, random


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    return gf.save(random(CASES["llama"]), tmp_path / "m.gguf", format="gguf")


@NEEDS_LLAMA
def test_logits_and_tokens(file):
    answer = llama.run_llama(file, [5, 6, 7], 4, [])
    assert answer["logits"].shape == (3, 97)
    assert len(answer["greedy"]) == 4
    assert answer["greedy"][0] == answer["logits"][-1].argmax()


@NEEDS_LLAMA
def test_a_file_that_it_does_not_load_is_an_error_and_not_the_end_of_our_process(file):
    file.write_bytes(file.read_bytes()[:-20000])
    answer = llama.run_llama(file, [5], 1, [])
    assert set(answer) == {"error"}
    assert answer["error"]


def test_a_process_that_does_not_answer(file, monkeypatch):
    monkeypatch.setattr(llama, "SECONDS", 0.2)
    real = subprocess.run
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(subprocess, "run", lambda command, **options: real(sleep, **options))
    assert "did not finish within 0.2 seconds" in llama.run_llama(file, [5], 1, [])["error"]
