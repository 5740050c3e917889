"""The Triton kernel against the plain chunk: in Triton's interpreter, and where there is a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_it_is_the_plain_chunk():
    command = [sys.executable, "-m", "tests.kernels.cuda.training.interpreted_loss"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for differences in json.loads(done.stdout.splitlines()[-1]):
        assert max(differences) < 1e-5  # float32 sums in another order


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_triton_chunk_equals_the_plain_one():
    from glassformer.bench.gpu.cuda_kernels import triton_loss_equals_plain

    assert all(finding.passed for finding in triton_loss_equals_plain())
