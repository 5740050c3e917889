"""Masks, written out by hand for small cases."""

import torch

from glassformer.model.masks import causal, prefix, window

upto = torch.arange


def test_causal_by_index():
    assert causal(upto(3), upto(3)).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal(torch.tensor([2]), upto(4)).int().tolist() == [[1, 1, 1, 0]]


def test_window_counts_the_token_itself():
    assert window(upto(4), upto(4), 2).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert torch.equal(window(upto(4), upto(4), 1), torch.eye(4, dtype=torch.bool))


def test_prefix_is_open_inside_and_causal_after():
    assert prefix(torch.tensor([2]), 4)[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
