"""The Triton kernel against the plain chunk, where there is a GPU; benchmarks/cuda_check.py runs the same."""

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_triton_chunk_equals_the_plain_one():
    from benchmarks.cuda_check import triton_loss_equals_plain

    assert all(finding.passed for finding in triton_loss_equals_plain())
