"""The place where evaluation loads models."""

import pytest
import torch

import glassformer as gf
from glassformer.evaluation.load import open_model
from tests import folders


def test_a_model_comes_with_its_tokenizer_in_the_dtype_it_is_computed_in(tmp_path):
    folder = folders.write(tmp_path / "model")
    model, tokenizer = open_model(str(folder), "bfloat16", "cpu")
    assert next(model.parameters()).dtype is torch.bfloat16
    assert tokenizer.get_vocab_size() == 300
    gf.save(model, tmp_path / "half", format="glass")
    again, none = open_model(str(tmp_path / "half"), "auto", "cpu")
    assert next(again.parameters()).dtype is torch.float32
    assert none is None or none.get_vocab_size() == 300
    with pytest.raises(gf.GlassformerError, match="nowhere"):
        open_model(str(tmp_path / "nowhere"))
