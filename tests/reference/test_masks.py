"""Masks and positions, drawn out by hand: rows are queries, 1 means may attend."""

import numpy as np
import pytest

from glassformer.reference.masks import architecture_mask, as_mask, default_positions, prefix_mask, self_mask


def test_architecture_masks_by_hand() -> None:
    np.testing.assert_array_equal(architecture_mask(3, True, None), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(architecture_mask(3, True, 2), [[1, 0, 0], [1, 1, 0], [0, 1, 1]])
    np.testing.assert_array_equal(architecture_mask(3, False, None), np.ones((3, 3)))
    np.testing.assert_array_equal(architecture_mask(3, False, 2), [[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    np.testing.assert_array_equal(architecture_mask(3, True, 1), np.eye(3))


def test_padding_is_hidden_and_an_empty_query_sees_itself() -> None:
    left = self_mask(1, 4, True, None, np.array([[False, False, True, True]]))
    np.testing.assert_array_equal(left[0], [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    right = self_mask(1, 4, True, None, np.array([[True, True, False, False]]))
    np.testing.assert_array_equal(right[0], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    windowed = self_mask(1, 4, True, 2, np.array([[True, True, False, False]]))
    np.testing.assert_array_equal(windowed[0], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])


def test_a_whole_pattern_replaces_causality_and_window() -> None:
    pattern = np.array([[[0, 1, 1], [0, 0, 0], [1, 0, 0]]], dtype=bool)
    np.testing.assert_array_equal(self_mask(1, 3, True, 1, pattern)[0], [[0, 1, 1], [0, 1, 0], [1, 0, 0]])


def test_prefix_sees_itself_freely_and_the_rest_is_causal() -> None:
    first, second = prefix_mask([2, 0], 4)
    np.testing.assert_array_equal(first, [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(second, np.tri(4))


def test_positions_count_real_tokens() -> None:
    np.testing.assert_array_equal(default_positions(2, 3, None), [[0, 1, 2], [0, 1, 2]])
    mask = np.array([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]], dtype=bool)
    np.testing.assert_array_equal(default_positions(3, 4, mask), [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]])
    np.testing.assert_array_equal(default_positions(1, 2, np.ones((1, 2, 2), dtype=bool)), [[0, 1]])


def test_mask_refusals() -> None:
    assert as_mask(None, 2, 3) is None
    np.testing.assert_array_equal(as_mask([[1, 0]], 1, 2), [[True, False]])
    with pytest.raises(ValueError, match=r"give \(2, 3\)"):
        as_mask(np.ones((3, 2)), 2, 3)
    with pytest.raises(ValueError, match="additive"):
        as_mask(np.array([[0.0, -np.inf]]), 1, 2)
