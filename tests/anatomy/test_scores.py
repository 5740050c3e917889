"""Scores of any layout, and which keys they hide."""

import pytest
import torch

from glassformer.anatomy.scores import as_heads, hidden_keys

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
