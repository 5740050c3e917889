"""The attention maps of the tour are those of the lens, on a line of the validation split."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.tour.attention import attention_maps
from glassformer.training.data.tokenizer import CharTokenizer

TEXT = "short\nthis line is long enough to be shown here\nand more"


@pytest.fixture(scope="module")
def made():
    tokenizer = CharTokenizer("".join(sorted(set(TEXT))))
    model = gf.build(gf.presets.nano(n_layers=2, n_heads=2, d_model=32, vocab_size=tokenizer.vocab_size), seed=0).eval()
    data = SimpleNamespace(tokenizer=tokenizer, val=np.asarray(tokenizer.encode(TEXT)))
    return model, tokenizer, attention_maps(model, SimpleNamespace(data=data), length=20)


def test_the_first_line_that_is_long_enough_is_shown(made):
    assert "".join(made[2].tokens) == "this line is long en"


def test_patterns_are_those_of_the_model(made):
    model, tokenizer, maps = made
    expected = gf.trace(model, tokenizer.encode("this line is long en").tolist()).stack("blocks.*.attention.pattern")[
        :, 0
    ]
    assert torch.allclose(torch.tensor(maps.patterns), expected)
    assert maps.previous[1][0] == pytest.approx(float(expected[1, 0].diagonal(-1).mean()))
    entropy = torch.special.entr(expected).sum(-1).mean(-1)
    assert entropy[maps.sharpest] == entropy.min()
