"""Scores of any layout, and which keys they hide."""

import pytest
import torch

from glassformer.anatomy.scores import as_heads, hidden_keys, keys_last

B, G, R, T, S = 2, 3, 5, 7, 7


@pytest.mark.parametrize(
    "stored",
    [
        lambda x: x,
        lambda x: x.flatten(0, 1),
        lambda x: x.unflatten(1, (G, R)),
        lambda x: x.unflatten(1, (G, R)).permute(3, 0, 1, 2, 4),
    ],
)
def test_every_layout_of_the_heads_gives_the_same_scores(stored):
    scores = torch.rand(B, G * R, T, S)
    assert torch.equal(as_heads(stored(scores), B), scores)


def test_an_unknown_layout_is_not_guessed():
    assert as_heads(torch.rand(3, 4, T, S), B) is None
    assert as_heads(torch.rand(T, S), B) is None


def test_mask_constants_hide_and_large_scores_do_not():
    scores = torch.tensor([[0.0, -torch.inf, -1e9, -1e4, -300.0], [-1e31, 5.0, 5.0, 5.0, -4000.0]])
    assert hidden_keys(scores).tolist() == [[False, True, True, True, False], [True, False, False, False, False]]


@pytest.mark.parametrize(
    ("layout", "order"),
    [("bhts", [0, 1, 2, 3]), ("bths", [0, 2, 1, 3]), ("tsbh", [2, 3, 0, 1]), ("hbts", [0, 1, 2, 3])],
)
def test_queries_and_keys_come_last(layout, order):
    sizes = {"b": 2, "h": 3, "t": 7, "s": 9}
    assert keys_last(tuple(sizes[letter] for letter in layout), 7, 9) == order


def test_heads_before_the_batch_are_put_after_it():
    scores = torch.rand(B, R, T, S)
    assert torch.equal(as_heads(scores.transpose(0, 1), B), scores)


def test_sizes_that_are_not_found_leave_the_order():
    assert keys_last((2, 3, 7, 9), 14, 9) == [0, 1, 2, 3]
    assert keys_last((2, 7, 9), 9, 7) == [0, 1, 2]
