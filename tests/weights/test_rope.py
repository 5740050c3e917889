"""Rotary tables of config.json, old and new spelling, against transformers."""

import json

import pytest
import torch
import transformers as hf

from glassformer.config import Llama3Scaling, Rotary, YarnScaling
from glassformer.weights import WeightsError, load, load_config
from tests.weights.test_llama import llama
from tests.weights.tiny import BOUND, batch, decoder_gap, edit, random_model, round_trip, saved

TABLES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **{"original_max_position_embeddings": 16, "rope_theta": 500.0},
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
    "yarn-all": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
        **{"attention_factor": 0.7, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False},
    },
    "yarn-mscale": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
        **{"mscale": 0.7, "mscale_all_dim": 1.3},
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_logits_equal_transformers(tmp_path, name):
    model = random_model(*llama(rope_parameters=dict(TABLES[name])), torch.float64)
    folder = saved(model, tmp_path / "in")
    assert decoder_gap(model, folder, "left", torch.float64) <= BOUND[torch.float64]
    model = random_model(*llama(rope_parameters=dict(TABLES[name])))
    round_trip(model, saved(model, tmp_path / "in32"), tmp_path, lambda m: m(batch("none")[0]).logits)


@pytest.mark.parametrize("name", TABLES)
def test_old_spelling_means_the_same(tmp_path, name):
    folder = saved(random_model(*llama(rope_parameters=dict(TABLES[name]))), tmp_path)
    new = load_config(folder)
    old = {("type" if k == "rope_type" else k): v for k, v in TABLES[name].items() if k != "rope_theta"}
    edit(folder, rope_parameters=..., rope_theta=500.0, rope_scaling=None if name == "default" else old)
    assert load_config(folder) == new
    reread = hf.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert decoder_gap(reread, folder, "none", torch.float32) <= BOUND[torch.float32]


def test_original_length_is_the_context_when_it_is_not_given(tmp_path):
    table = {k: v for k, v in TABLES["yarn"].items() if not k.startswith("original")}
    folder = saved(random_model(*llama()), tmp_path)
    edit(folder, rope_parameters=table)
    assert load_config(folder).position == Rotary(base=500.0, scaling=YarnScaling(4.0, 64))


def test_llama3_release_is_read_as_published(tmp_path):
    folder = saved(random_model(*llama()), tmp_path)
    published = {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    }
    edit(folder, rope_parameters=..., rope_theta=500000.0, rope_scaling=published, max_position_embeddings=131072)
    assert load_config(folder).position == Rotary(base=500000.0, scaling=Llama3Scaling(8.0, 8192))


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "one for each frequency"),
        ({"rope_type": "longrope", "short_factor": 2.0, "long_factor": [1.0]}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": ["1"]}, "long_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "default", "mrope_section": 3}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_type": "default", "rope_theta": "10000"}, "rope_theta"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused(tmp_path, table, word):
    folder = saved(random_model(*llama()), tmp_path)
    edit(folder, rope_parameters=table)
    with pytest.raises(WeightsError, match=word) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_both_spellings_are_written(tmp_path):
    model = random_model(*llama(rope_parameters=dict(TABLES["linear"])))
    out = round_trip(model, saved(model, tmp_path / "in"), tmp_path, lambda m: m(batch("none")[0]).logits)
    data = json.loads((out / "config.json").read_text())
    assert data["rope_parameters"] == TABLES["linear"]
    assert (data["rope_theta"], data["rope_scaling"]) == (500.0, {"rope_type": "linear", "factor": 3.0})
