"""The persistent kernel: in Triton's interpreter it gives the engine's tokens and logits; on a GPU likewise."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
KNOWN = ("none", "learned", "sinusoidal", "rotary-halves", "rotary-interleaved", "rotary-yarn", "rotary-llama3")


def interpreted(cases):
    command = [sys.executable, "-m", "tests.generate.cuda.interpreted", json.dumps(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(cases):
    for case, (same, error) in zip(cases, interpreted(cases), strict=True):
        assert same, case
        assert error < 2e-6, case  # float32 sums in another order


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_interpreted_it_is_the_engine():
    check([("rotary-halves", True, 12)])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_every_position_scheme_both_kinds_of_block_prompt_or_none(name):
    check([(name, modern, prompt) for modern in (False, True) for prompt in (1, 12)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_the_engine():
    from benchmarks.decode_gpu import same_tokens

    assert all(finding.passed for finding in same_tokens())
