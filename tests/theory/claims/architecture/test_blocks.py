"""Shapes and what they do not show."""

import pytest
import torch

from glassformer.model.block import PreNormBlock
from glassformer.model.layers import LayerNorm
from glassformer.theory.claims.architecture import blocks
from glassformer.theory.claims.claim import Lab


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    monkeypatch.setattr(blocks, "BATCHES", (2,))
    monkeypatch.setattr(blocks, "LENGTHS", (1, 5))
    monkeypatch.setattr(blocks, "WIDTHS", (8,))


@pytest.mark.parametrize("name", blocks.MUTANTS)
def test_wrong_blocks_keep_the_shape_and_not_the_values(name):
    misshapen, furthest = blocks.examine(blocks.MUTANTS[name], Lab())
    assert misshapen == 0
    assert furthest > 1


def test_softmax_over_queries_is_right_for_one_token():
    x = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrong, right = (blocks.make_block(kind, 8, 0) for kind in (blocks.SoftmaxOverQueries, PreNormBlock))
    torch.testing.assert_close(blocks.through(wrong, x), blocks.through(right, x))


def test_an_engine_with_another_epsilon_is_caught(monkeypatch):
    original = LayerNorm.__init__

    def other_epsilon(self, *arguments):
        original(self, *arguments)
        self.eps = 1e-3

    monkeypatch.setattr(LayerNorm, "__init__", other_epsilon)
    assert blocks.examine(PreNormBlock, Lab())[1] > 1e-6


def test_a_model_that_answers_everything_is_caught():
    found = {f.id: f for f in blocks.gpt_logits_shape(Lab(broken=True))}
    errors = found["invalid inputs"].evidence["errors"]
    assert [name for name, text in errors.items() if not text] == ["one token too many"]
