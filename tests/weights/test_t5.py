"""T5 folders, v1.0 and v1.1, compute here what they compute in transformers."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from glassformer.config import Head, presets, replace
from glassformer.model import build
from glassformer.weights import WeightsError, load, load_config, save
from tests.weights.tiny import (
    BOUND,
    DTYPES,
    PADDING,
    batch,
    edit,
    gap,
    precision,
    random_model,
    reopen,
    round_trip,
    saved,
)


def config(**changes):
    sizes = {"vocab_size": 97, "d_model": 31, "d_kv": 7, "d_ff": 53, "num_layers": 2, "num_decoder_layers": 3}
    sizes |= {"num_heads": 5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    return hf.T5Config(**{**sizes, "decoder_start_token_id": 0, **changes})


VERSIONS = {
    "v1.0": {},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gated-silu": {"feed_forward_proj": "gated-silu"},
    "dense-gelu": {"feed_forward_proj": "gelu"},
}


def untied(cls, cfg, dtype=torch.float32):
    """transformers 5 ties T5's head when it is made; the v1.1 files do not, so it is cut loose before the noise."""
    with precision(dtype):
        model = cls(cfg)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.all_tied_weights_keys.pop("lm_head.weight")
    return random_model(lambda _: model, cfg, dtype)


def make(version, dtype=torch.float32):
    cfg = config(**VERSIONS[version])
    maker = untied if version == "v1.1" else random_model
    return maker(hf.T5ForConditionalGeneration, cfg, dtype)


@torch.no_grad()
def compare(model, folder, side, dtype):
    source, source_mask, _ = batch(side)
    target, mask, _ = batch("right" if side != "none" else "none", seed=2, length=7)
    with precision(dtype):
        theirs = model(
            source, attention_mask=source_mask.long(), decoder_input_ids=target, decoder_attention_mask=mask.long()
        ).logits
    given = {} if side == "none" else {"source_mask": source_mask, "mask": mask}
    ours = load(folder)(source, target, **given)
    assert ours.dtype == dtype
    return gap(ours, theirs, mask)


@pytest.mark.sample(6)
@DTYPES
@PADDING
@pytest.mark.parametrize("version", VERSIONS)
def test_logits_equal_transformers(tmp_path, version, dtype, side):
    model = make(version, dtype)
    assert compare(model, saved(model, tmp_path), side, dtype) <= BOUND[dtype]


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_round_trip_gives_the_same_file_and_logits(tmp_path, version):
    model = make(version)
    source, target = batch("none")[0], batch("none", seed=2)[0]
    out = round_trip(
        model, saved(model, tmp_path / "in"), tmp_path, lambda m: m(source, decoder_input_ids=target).logits
    )
    assert reopen(out).generation_config.decoder_start_token_id == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@torch.no_grad()
def test_head_tied_or_not_scaled_or_not_all_reach_transformers(tmp_path, tied, scaled):
    small = {"d_model": 24, "n_layers": 2, "n_encoder_layers": 2, "n_heads": 3, "d_ff": 31, "vocab_size": 97}
    ours = build(replace(presets.t5_small(**small), head=Head(tied=tied, scale=24**-0.5 if scaled else 1.0)), seed=4)
    ours.eval()
    source, target = batch("none")[0], batch("none", seed=2)[0]
    out = save(ours, tmp_path / "out")
    assert (reopen(out)(source, decoder_input_ids=target).logits - ours(source, target)).abs().max() <= 1e-5
    assert load(out).config == ours.config


def test_scale_follows_the_flags_of_every_generation_of_files(tmp_path):
    folder = saved(make("v1.0"), tmp_path)
    for flags, scale in [
        ({"tie_word_embeddings": True, "scale_decoder_outputs": ...}, 31**-0.5),
        ({"tie_word_embeddings": ..., "scale_decoder_outputs": ...}, 31**-0.5),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": ...}, 1.0),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, 1.0),
    ]:
        edit(folder, **flags)
        assert load_config(folder).head == Head(tied=True, scale=scale)
        reread = hf.T5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
        assert compare(reread, folder, "none", torch.float32) <= BOUND[torch.float32]


@torch.no_grad()
def test_encoder_alone_is_read_and_written(tmp_path):
    model = random_model(hf.T5EncoderModel, config(), torch.float64)
    folder = saved(model, tmp_path / "in")
    tokens, mask, _ = batch("right")
    with precision(torch.float64):
        theirs = model(tokens, attention_mask=mask.long()).last_hidden_state
    ours = load(folder)
    assert gap(ours.encode(tokens, mask=mask), theirs, mask) <= 1e-9
    model32 = random_model(hf.T5EncoderModel, config())
    round_trip(model32, saved(model32, tmp_path / "in32"), tmp_path, lambda m: m(tokens).last_hidden_state)


def test_base_model_gets_the_tied_head(tmp_path):
    model = random_model(hf.T5Model, config())
    assert load(saved(model, tmp_path)).config.head == Head(tied=True, scale=31**-0.5)


def test_copies_of_the_table_are_dropped_when_equal_and_reported_when_not(tmp_path):
    folder = saved(make("v1.0"), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    shared = tensors["shared.weight"]
    copies = {f"{stack}.embed_tokens.weight": shared.clone() for stack in ("encoder", "decoder")}
    copies["lm_head.weight"] = shared.clone()
    copies["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 5)
    save_file(tensors | copies, file)
    assert torch.equal(load(folder).embed.tokens.weight, shared)
    del tensors["shared.weight"]
    save_file(tensors | copies, file)
    assert torch.equal(load(folder).embed.tokens.weight, shared)
    save_file(tensors | copies | {"decoder.embed_tokens.weight": shared + 1}, file)
    with pytest.raises(WeightsError, match=r"decoder\.embed_tokens\.weight differs"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"feed_forward_proj": "gated-mish", "dense_act_fn": ...},
        {"feed_forward_proj": "twice-gated-relu"},
        {"dense_act_fn": "gelu"},
        {"is_gated_act": True},
        {"is_decoder": True},
        {"relative_attention_num_buckets": 6},
        {"model_type": "umt5"},
        {"model_type": "longt5"},
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused(tmp_path, changes):
    folder = saved(make("v1.0"), tmp_path)
    edit(folder, **changes)
    with pytest.raises(WeightsError) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_full_size_t5_small(tmp_path):
    model = hf.T5ForConditionalGeneration(hf.T5Config(attn_implementation="eager", decoder_start_token_id=0)).eval()
    ours = load(saved(model, tmp_path))
    assert sum(p.numel() for p in ours.parameters()) == 60_506_624
    target = torch.randint(32128, (3, 60))
    for dtype in (torch.float32, torch.float64):
        ours, model = ours.to(dtype), model.to(dtype)
        for side in ("right", "left"):
            source, mask, _ = batch(side, vocab=32128, length=200)
            with torch.no_grad(), precision(dtype):
                theirs = model(source, attention_mask=mask.long(), decoder_input_ids=target).logits
            with torch.no_grad():
                assert (ours(source, target, source_mask=mask) - theirs).abs().max() <= BOUND[dtype]
