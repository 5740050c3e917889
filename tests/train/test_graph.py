"""Captured steps against ordinary ones, where there is a GPU; benchmarks/cuda_check.py runs the same."""

import pytest
import torch

from glassformer.train.graph import can_capture
from glassformer.train.loop import prepare_state
from tests.train import tiny


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_captured_steps_equal_ordinary_ones():
    from benchmarks.cuda_check import captured_step_equals_eager

    assert all(finding.passed for finding in captured_step_equals_eager())


def test_a_cpu_does_not_capture(tmp_path):
    assert not can_capture(prepare_state(tiny.session(tmp_path).run))
