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


@torch.no_grad()
def test_an_adapter_is_merged_and_its_own_tokenizer_is_used(tmp_path):
    folder = folders.write(tmp_path / "model")
    adapter = folders.write_adapter(folder, tmp_path / "adapter")
    model, tokenizer = open_model(str(folder), "auto", "cpu", str(adapter))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), gf.load(folder, adapter=adapter)(tokens))
    assert not torch.allclose(model(tokens), gf.load(folder)(tokens), atol=1e-2)
    assert tokenizer.get_vocab_size() == 300
    folders.tokenizer(280).save(str(adapter / "tokenizer.json"))
    assert open_model(str(folder), adapter=str(adapter))[1].get_vocab_size() == 280
