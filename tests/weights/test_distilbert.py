"""DistilBERT folders compute here what they compute in transformers."""

import pytest
import torch
import transformers as hf

from glassformer.config import LayerNorm, presets
from glassformer.model import build
from glassformer.weights import WeightsError, load, save
from tests.weights.tiny import (
    BOUND,
    DTYPES,
    PADDING,
    batch,
    decoder_gap,
    edit,
    gap,
    precision,
    random_model,
    round_trip,
    saved,
)


def config(**changes):
    sizes = {"vocab_size": 97, "dim": 35, "hidden_dim": 53, "n_layers": 3, "n_heads": 5, "max_position_embeddings": 23}
    return hf.DistilBertConfig(**{**sizes, **changes})


@DTYPES
@PADDING
def test_logits_equal_transformers(tmp_path, dtype, side):
    model = random_model(hf.DistilBertForMaskedLM, config(), dtype)
    assert decoder_gap(model, saved(model, tmp_path), side, dtype) <= BOUND[dtype]


@pytest.mark.parametrize(
    "changes",
    [{"activation": "relu"}, {"tie_word_embeddings": False}, {"sinusoidal_pos_embds": True, "dim": 40}],
    ids=str,
)
def test_variants_equal_transformers(tmp_path, changes):
    model = random_model(hf.DistilBertForMaskedLM, config(**changes), torch.float64)
    folder = saved(model, tmp_path / "in")
    assert decoder_gap(model, folder, "left", torch.float64) <= BOUND[torch.float64]
    round_trip(model, folder, tmp_path, lambda m: m(batch("none")[0]).logits)


@torch.no_grad()
def test_bare_encoder_gives_hidden_states(tmp_path):
    model = random_model(hf.DistilBertModel, config(), torch.float64)
    tokens, mask, _ = batch("right")
    with precision(torch.float64):
        theirs = model(tokens, attention_mask=mask.long()).last_hidden_state
    folder = saved(model, tmp_path / "in")
    ours = load(folder)
    assert ours.config.head is None
    assert gap(ours.encode(tokens, mask=mask), theirs, mask) <= 1e-9
    round_trip(model, folder, tmp_path, lambda m: m(tokens).last_hidden_state)


def test_another_eps_cannot_be_written(tmp_path):
    small = {"d_model": 24, "n_layers": 1, "n_heads": 3, "d_ff": 31, "vocab_size": 97}
    model = build(presets.distilbert_base(**small, norm=LayerNorm(eps=1e-5)))
    with pytest.raises(WeightsError, match="norm"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"activation": "mish"}, {"n_heads": 4}, {"dim": None}], ids=str)
def test_what_cannot_be_represented_is_refused(tmp_path, changes):
    folder = saved(random_model(hf.DistilBertForMaskedLM, config()), tmp_path)
    edit(folder, **changes)
    with pytest.raises(WeightsError) as refused:
        load(folder)
    assert "\n" not in str(refused.value)
