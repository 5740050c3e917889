"""Positions and masks of a forward pass, written out by hand for small cases."""

import pytest
import torch

from glassformer.model.cache import Cache
from glassformer.model.context import attention_masks, forward_context
from glassformer.model.positions import NoPosition

CPU = torch.device("cpu")


def recorded(past: int, new: int, real=None, **settings) -> Cache:
    """A cache that holds `past` tokens and has just recorded `new` more."""
    cache = Cache(CPU, **settings)
    if past:
        cache.append(past)
    cache.append(new, real=real)
    return cache


def masks(cache, width=None, is_causal=True, **settings):
    return attention_masks(cache, [width], is_causal, **settings)[0]


def test_no_mask_is_built_where_none_is_needed():
    assert masks(recorded(0, 5)) == (None, True)
    assert masks(recorded(4, 1)) == (None, False)
    assert masks(recorded(0, 5), is_causal=False) == (None, False)
    assert masks(recorded(2, 1), width=3) == (None, False)
    assert masks(recorded(0, 1)) == (None, False)


def test_new_tokens_after_cached_ones_attend_to_all_before():
    mask, is_causal = masks(recorded(2, 2))
    assert not is_causal
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_layers_differ_in_their_window():
    wide, narrow = attention_masks(recorded(0, 3), [None, 2], True)
    assert wide == (None, True)
    assert narrow[0][0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_empty_slots_of_a_fixed_buffer_are_masked():
    mask, _ = masks(recorded(1, 1, capacity=4, fixed=True))
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0]]


def test_a_padding_query_attends_to_itself_and_no_query_to_padding():
    mask, _ = masks(recorded(0, 4, real=torch.tensor([[False, False, True, True]])))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_a_bias_is_masked_once_for_all_layers():
    first, second = attention_masks(recorded(0, 2), [None, None], True, bias=torch.ones(1, 1, 2, 2))
    assert first[0].tolist() == [[[[1.0, -torch.inf], [1.0, 1.0]]]]
    assert second[0] is first[0]


def test_a_whole_pattern_must_fit_and_leaves_no_query_without_a_key():
    pattern = torch.tensor([[[False, False], [True, False]]])
    mask, _ = masks(recorded(0, 2), pattern=pattern)
    assert mask[0, 0].int().tolist() == [[1, 0], [1, 0]]
    with pytest.raises(ValueError, match="does not fit 3 queries over 3 keys"):
        masks(recorded(0, 3), pattern=pattern)


def test_positions_count_on_from_the_last_real_token():
    cache, x = Cache(CPU), torch.zeros(2, 3, 4)
    real = torch.tensor([[False, True, True], [True, True, True]])
    assert forward_context(x, NoPosition(), [], True, real, cache=cache).positions.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert forward_context(x[:, :1], NoPosition(), [], True, cache=cache).positions.tolist() == [[2], [3]]
