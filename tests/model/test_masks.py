"""Who sees whom, written out by hand for small cases."""

import torch

from glassformer.model.masks import causal, prefix, self_view, window

upto = torch.arange


def test_causal_by_index():
    assert causal(upto(3), upto(3)).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal(torch.tensor([2]), upto(4)).int().tolist() == [[1, 1, 1, 0]]


def test_window_counts_the_token_itself():
    assert window(upto(4), upto(4), 2).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert torch.equal(window(upto(4), upto(4), 1), torch.eye(4, dtype=torch.bool))


def test_prefix_is_open_inside_and_causal_after():
    assert prefix(torch.tensor([2]), 4)[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_no_mask_is_made_where_none_is_needed():
    assert self_view(upto(5), upto(5), None, True, None) == (None, True)
    assert self_view(torch.tensor([4]), upto(5), None, True, None) == (None, False)
    assert self_view(upto(5), upto(5), None, False, None) == (None, False)
    assert self_view(torch.tensor([2]), upto(3), None, True, 3) == (None, False)
    assert self_view(upto(1), upto(1), None, True, None) == (None, False)


def test_empty_slots_of_a_fixed_buffer_stay_hidden():
    view = self_view(torch.tensor([1]), upto(4), None, True, None, fixed=True)
    assert view.mask[0, 0].int().tolist() == [[1, 1, 0, 0]]


def test_a_padding_query_sees_itself_and_nobody_sees_padding():
    real = torch.tensor([[False, False, True, True]])
    view = self_view(upto(4), upto(4), real, True, None)
    assert view.mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
