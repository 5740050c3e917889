"""Each layout is undone by its inverse, and the rows of a head are ordered as llama.cpp rotates them."""

import pytest
import torch

from glassformer.weights.formats.gguf.layouts import PLUS_ONE, VECTOR, ByHead, Interleaved


@pytest.mark.parametrize("layout", [PLUS_ONE, Interleaved(3)], ids=lambda layout: type(layout).__name__)
@pytest.mark.parametrize("shape", [(24, 7), (24,)])
def test_there_and_back(layout, shape):
    tensor = torch.randn(shape)
    there = layout.theirs([tensor])
    assert layout.shape([shape]) == there.shape
    assert not torch.equal(there, tensor)
    assert torch.allclose(layout.ours(there, [shape])[0], tensor, rtol=0, atol=3e-7)  # 1 + w rounds


@pytest.mark.parametrize("layout", [VECTOR, ByHead(3), ByHead(3, transposed=True)], ids=str)
def test_of_other_dimensions_there_and_back(layout):
    tensor = torch.randn(1 if layout is VECTOR else 24, 7)
    there = layout.theirs([tensor])
    assert layout.shape([tuple(tensor.shape)]) == there.shape
    assert torch.equal(layout.ours(there, [tuple(tensor.shape)])[0], tensor)


def test_matrices_by_head():
    rows = torch.arange(12).view(6, 2)  # 2 heads of 3 rows
    assert ByHead(2).theirs([rows])[1].tolist() == [[6, 7], [8, 9], [10, 11]]
    assert ByHead(2, transposed=True).theirs([rows])[1].tolist() == [[6, 8, 10], [7, 9, 11]]


def test_pairs_become_neighbours():
    rows = torch.arange(24)  # 3 heads of 8: the pairs of head 0 are (0, 4), (1, 5), ...
    assert Interleaved(3).theirs([rows]).tolist()[:12] == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13]
