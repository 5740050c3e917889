"""Each layout is undone by its inverse, and the rows of a head are ordered as llama.cpp rotates them."""

import pytest
import torch

from glassformer.weights.formats.gguf.layouts import SAME, TRANSPOSED, Interleaved

DATA = {"num_attention_heads": 3, "num_key_value_heads": None}


@pytest.mark.parametrize(
    "layout", [SAME, TRANSPOSED, Interleaved("num_attention_heads")], ids=lambda layout: type(layout).__name__
)
@pytest.mark.parametrize("shape", [(24, 7), (24,)])
def test_there_and_back(layout, shape):
    tensor = torch.randn(shape)
    there = layout.to_gguf(tensor, DATA)
    assert layout.hf_shape(tuple(there.shape)) == shape
    assert torch.allclose(layout.to_hf(there, DATA), tensor, rtol=0, atol=3e-7)  # 1 + w rounds
    assert (layout.to_hf(there, DATA).data_ptr() != there.data_ptr()) == layout.copies


def test_pairs_become_neighbours():
    rows = torch.arange(24)  # 3 heads of 8: the pairs of head 0 are (0, 4), (1, 5), ...
    assert Interleaved("num_attention_heads").to_gguf(rows, DATA).tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert Interleaved("num_key_value_heads").to_gguf(rows, DATA).tolist()[8:12] == [8, 12, 9, 13]
