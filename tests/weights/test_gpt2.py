"""GPT-2 folders compute here what they compute in transformers."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from glassformer.config import Head, presets
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
    reopen,
    round_trip,
    saved,
)


def config(**changes):
    sizes = {"n_embd": 35, "n_layer": 3, "n_head": 5, "n_inner": 53, "vocab_size": 97, "n_positions": 23}
    return hf.GPT2Config(**{**sizes, "bos_token_id": 2, "eos_token_id": 2, **changes})


@DTYPES
@PADDING
def test_logits_equal_transformers(tmp_path, dtype, side):
    model = random_model(hf.GPT2LMHeadModel, config(), dtype)
    assert decoder_gap(model, saved(model, tmp_path), side, dtype) <= BOUND[dtype]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_weights": False},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"n_inner": None},
        {"tie_word_embeddings": False},
        {"layer_norm_epsilon": 0.1},
    ],
    ids=str,
)
def test_variants_equal_transformers(tmp_path, changes):
    model = random_model(hf.GPT2LMHeadModel, config(**changes), torch.float64)
    folder = saved(model, tmp_path / "in")
    assert decoder_gap(model, folder, "left", torch.float64) <= BOUND[torch.float64]
    round_trip(model, folder, tmp_path, lambda m: m(batch("none")[0]).logits)


def test_round_trip_gives_the_same_file_and_logits(tmp_path):
    model = random_model(hf.GPT2LMHeadModel, config())
    out = round_trip(model, saved(model, tmp_path / "in"), tmp_path, lambda m: m(batch("none")[0]).logits)
    assert reopen(out).generation_config.eos_token_id == 2


@torch.no_grad()
def test_bare_model_gets_the_tied_head(tmp_path):
    model = random_model(hf.GPT2Model, config(), torch.float64)
    tokens = batch("none")[0]
    with precision(torch.float64):
        hidden = model(tokens).last_hidden_state
    ours = load(saved(model, tmp_path))
    assert (ours.encode(tokens) - hidden).abs().max() <= 1e-9
    assert (ours(tokens) - hidden @ model.wte.weight.T).abs().max() <= 1e-9


@torch.no_grad()
def test_bare_untied_model_has_no_head_and_is_written_back_bare(tmp_path):
    model = random_model(hf.GPT2Model, config(tie_word_embeddings=False))
    folder = saved(model, tmp_path / "in")
    assert load(folder).config.head is None
    round_trip(model, folder, tmp_path, lambda m: m(batch("none")[0]).last_hidden_state)


def test_masks_stored_by_old_versions_are_dropped(tmp_path):
    model = random_model(hf.GPT2Model, config())
    saved(model, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {f"h.{i}.attn.bias": torch.ones(1, 1, 23, 23) for i in range(3)}
    old |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    save_file(load_file(file) | old, file)
    assert load(tmp_path).config.n_layers == 3


def test_stored_head_equal_to_the_table_is_tied_and_a_different_one_is_not(tmp_path):
    model = random_model(hf.GPT2LMHeadModel, config())
    saved(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, file)
    assert load(tmp_path).config.head == Head(tied=True)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, file)
    untied = load(tmp_path)
    assert untied.config.head == Head(tied=False)
    assert "read as untied" in untied.origin.notes[0]


def test_a_decoder_without_biases_is_written_with_zero_ones(tmp_path):
    ours = build(presets.nano(d_model=24, n_layers=2, vocab_size=31), seed=3).eval()
    tokens = torch.randint(31, (2, 9))
    out = save(ours, tmp_path / "out")
    with torch.no_grad():
        assert (reopen(out)(tokens).logits - ours(tokens)).abs().max() <= 1e-5
        assert torch.equal(load(out)(tokens), ours(tokens)) or (load(out)(tokens) - ours(tokens)).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
        {"activation_function": "mish"},
        {"n_head": 6},
        {"n_embd": "35"},
        {"n_layer": None},
        {"quantization_config": {"bits": 4}},
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, changes):
    saved(random_model(hf.GPT2LMHeadModel, config()), tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(WeightsError) as refused:
        load(tmp_path)
    name = {"n_head": "n_heads"}.get(next(iter(changes)), next(iter(changes)))
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_full_size_gpt2_small(tmp_path):
    model = hf.GPT2LMHeadModel(hf.GPT2Config(attn_implementation="eager")).eval()
    ours = load(saved(model, tmp_path / "in"))
    assert sum(p.numel() for p in ours.parameters()) == 124_439_808
    for dtype, length in ((torch.float32, 200), (torch.float64, 50)):
        ours, model = ours.to(dtype), model.to(dtype)
        for side in ("right", "left"):
            tokens, mask, positions = batch(side, vocab=50257, length=length)
            with torch.no_grad():
                theirs = model(tokens, attention_mask=mask.long(), position_ids=positions).logits
                assert gap(ours(tokens, mask=mask), theirs, mask) <= BOUND[dtype]
