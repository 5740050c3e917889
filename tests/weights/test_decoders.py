"""Every decoder family: the logits of transformers, padded on either side, and the way back.

The settings are those in which each feature moves the logits (see `CONTROLS`, which turns each one off).
"""

import dataclasses
import json

import pytest
import torch
import transformers as hf

from glassformer import config as c
from glassformer.weights import load
from glassformer.weights.hf import DECODERS
from tests.weights.tiny import BOUND, batch, decoder_gap, gap, precision, random_model, round_trip, saved

# D is a perfect square: transformers rounds sqrt(D) to float32 in its embeddings
SIZES = {
    **{"vocab_size": 97, "hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 10},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CASES = {
    "gemma": lambda: (hf.GemmaForCausalLM, hf.GemmaConfig(**SIZES)),
    "gemma2": lambda: (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **SIZES, attn_logit_softcapping=0.5, final_logit_softcapping=0.8, sliding_window=4, query_pre_attn_scalar=13
        ),
    ),
    "gemma3": lambda: (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=13, layer_types=MIXED),
    ),
}


def reference(case, dtype):
    return random_model(*CASES[case](), dtype)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_and_the_way_back(tmp_path, case):
    model = reference(case, torch.float32)
    folder = saved(model, tmp_path / "in")
    for side in ("right", "left"):
        assert decoder_gap(model, folder, side, torch.float32) <= BOUND[torch.float32], side
    out = round_trip(model, folder, tmp_path, lambda m: m(batch("none")[0]).logits)
    assert json.loads((out / "config.json").read_text())["model_type"] == model.config.model_type
    double = reference(case, torch.float64)
    folder = saved(double, tmp_path / "double")
    assert decoder_gap(double, folder, "left", torch.float64) <= BOUND[torch.float64]


# A feature of a family turned off: the error must then be at least this large.
CONTROLS = {
    "norm offset": ("gemma", {"norm": c.RMSNorm()}, 1e-2),
    "embedding scale": ("gemma", {"embedding": c.Embedding()}, 1e-2),
    "sandwich": ("gemma2", {"attention__softcap": None}, 1e-3),
    "logit cap": ("gemma2", {"head__softcap": None}, 1e-2),
    "windows": ("gemma2", {"attention__window": 64}, 1e-3),
    "one base": ("gemma3", {"layer_kinds": ()}, 1e-3),
    "q/k norm offset": ("gemma3", {"attention__qk_norm": c.RMSNorm()}, 1e-3),
}


@pytest.mark.parametrize("name", CONTROLS)
@torch.no_grad()
def test_a_feature_that_is_turned_off_shows(tmp_path, name):
    case, changes, least = CONTROLS[name]
    model = reference(case, torch.float32)
    ours = load(saved(model, tmp_path))
    changed = type(ours)(c.replace(ours.config, **changes)).eval()
    changed.load_state_dict(ours.state_dict())
    tokens, mask, positions = batch("left")
    with precision(torch.float32):
        theirs = model(tokens, attention_mask=mask.long(), position_ids=positions).logits
    assert gap(ours(tokens, mask=mask), theirs, mask) <= BOUND[torch.float32]
    assert gap(changed(tokens, mask=mask), theirs, mask) >= least


def test_every_family_is_in_the_table():
    tried = {make()[1].model_type for make in CASES.values()}
    assert {family.name for family in DECODERS} == tried


def test_families_are_plain_descriptions():
    for family in DECODERS:
        assert family.needs_type
        assert dataclasses.is_dataclass(family)
