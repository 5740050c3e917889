"""The GPU checks, where there is a GPU."""

import pytest
import torch

from glassformer.bench.gpu import cuda_check


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("check", ["same_logits", "same_generation", "graph_replay_equals_eager"])
def test_engine_on_cuda(check):
    assert all(finding.passed for finding in getattr(cuda_check, check)())
