"""Each layout is undone by its inverse, and the rows of a head are ordered as llama.cpp rotates them."""

import pytest
import torch

from glassformer.weights.formats.gguf.layouts import PLUS_ONE, Interleaved


@pytest.mark.parametrize("layout", [PLUS_ONE, Interleaved(3)], ids=lambda layout: type(layout).__name__)
@pytest.mark.parametrize("shape", [(24, 7), (24,)])
def test_there_and_back(layout, shape):
    tensor = torch.randn(shape)
    there = layout.theirs([tensor])
    assert layout.shape([shape]) == there.shape
    assert not torch.equal(there, tensor)
    assert torch.allclose(layout.ours(there, [shape])[0], tensor, rtol=0, atol=3e-7)  # 1 + w rounds


def test_pairs_become_neighbours():
    rows = torch.arange(24)  # 3 heads of 8: the pairs of head 0 are (0, 4), (1, 5), ...
    assert Interleaved(3).theirs([rows]).tolist()[:12] == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13]
