"""Which family a folder is, decided by structure; which family can hold a config, and what none can."""

import pytest
import torch

from glassformer.config import (
    Alibi,
    Dense,
    Gated,
    LayerNorm,
    Learned,
    NoFeedForward,
    NoPosition,
    QueryKeyPosition,
    RMSNorm,
    Rotary,
    Sinusoidal,
    presets,
    replace,
)
from glassformer.model import build
from glassformer.weights.errors import WeightsError
from glassformer.weights.families import FAMILIES, arithmetic, choose, detect_family, difference, read_config, to_hf
from glassformer.weights.family import Source
from glassformer.weights.not_supported import NOT_SUPPORTED

LLAMA_KEYS = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"rms_norm_eps": 1e-6, "vocab_size": 31},
}


def test_keys_decide_and_no_name_is_needed():
    assert detect_family(Source(dict(LLAMA_KEYS), None)).name == "Llama"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gemma9", "Did you mean .*gemma2"),
        ("lama", "Did you mean .*llama"),
        ("", "Supported model types are .*bert.*gpt2.*llama.*mistral"),
        (7, "Supported model types are"),
    ],
)
def test_a_model_type_that_was_never_verified_is_refused_with_the_nearest_ones(kind, text):
    """A relative may have every key and tensor name of Llama and compute something else."""
    with pytest.raises(WeightsError, match=f"unknown architecture.*verified ones are loaded.*{text}") as refused:
        detect_family(Source({**LLAMA_KEYS, "model_type": kind, "architectures": ["X"]}, None))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "text"), [("mamba", "layers that are not attention"), ("gemma3n", "several residual streams")]
)
def test_architectures_that_cannot_be_loaded_are_refused_by_name(kind, text):
    with pytest.raises(WeightsError, match=f"model_type='{kind}', which cannot be loaded: it has {text}"):
        detect_family(Source({**LLAMA_KEYS, "model_type": kind}, None))


def test_no_supported_type_is_listed_as_unsupported():
    assert not {kind for family in FAMILIES for kind in family.types} & NOT_SUPPORTED.keys()


def test_missing_keys_of_a_known_type_are_named():
    with pytest.raises(WeightsError, match="lacks n_layer, n_head"):
        detect_family(Source({"model_type": "gpt2", "n_embd": 3}, None))
    with pytest.raises(WeightsError, match="unknown architecture"):
        detect_family(Source({}, None))


def test_model_types_belong_to_one_family_each():
    kinds = [kind for family in FAMILIES for kind in family.types]
    assert len(kinds) == len(set(kinds))


SMALL = {"d_model": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 31}
PRESETS = {
    **{"gpt2": "gpt2", "bert_base": "bert", "roberta_base": "roberta", "distilbert_base": "distilbert"},
    **{"t5_small": "t5", "t5_v1_1_small": "t5", "llama2_7b": "llama", "llama3_8b": "llama", "mistral_7b": "mistral"},
    **{"mixtral_8x7b": "mixtral", "qwen2_0_5b": "qwen2", "qwen3_0_6b": "qwen3", "nano": "gpt2"},
}


def small(name, **changes):
    groups = (
        {"n_kv_heads": 2} if name in ("llama3_8b", "mistral_7b", "mixtral_8x7b", "qwen2_0_5b", "qwen3_0_6b") else {}
    )
    extra = {"n_encoder_layers": 2} if name.startswith("t5") else {}
    return presets.ALL[name](**{**SMALL, **groups, **extra, **changes})


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_written_as_what_it_is(name):
    config = small(name)
    data, _ = to_hf(config, build(config).state_dict())
    assert data["model_type"] == PRESETS[name]


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("gpt2", {"position": Alibi()}, "position=Alibi"),
        ("gpt2", {"position": Sinusoidal()}, "position=Sinusoidal"),
        ("gpt2", {"position": NoPosition()}, "position=NoPosition"),
        ("gpt2", {"position": QueryKeyPosition()}, "position=QueryKeyPosition"),
        ("gpt2", {"position": QueryKeyPosition(Learned())}, "position=QueryKeyPosition"),
        ("gpt2", {"feedforward": NoFeedForward()}, "attention-only model has no Hugging Face family"),
        ("llama2_7b", {"feedforward": NoFeedForward()}, "attention-only model has no Hugging Face family"),
        ("bert_base", {"feedforward": NoFeedForward()}, "attention-only model has no Hugging Face family"),
        ("gpt2", {"norm": RMSNorm()}, "norm"),
        ("gpt2", {"placement": "parallel"}, "placement"),
        ("gpt2", {"placement": "post"}, "placement"),
        ("gpt2", {"feedforward": Gated(31)}, "feedforward"),
        ("gpt2", {"window": 4}, r"attention\.window"),
        ("gpt2", {"embedding__scale": 2.0}, "embedding"),
        ("gpt2", {"n_kv_heads": 2}, r"attention\.n_kv_heads"),
        ("gpt2", {"attention__scale": 0.5}, r"attention\.scale"),
        ("gpt2", {"head__scale": 0.5}, "head"),
        ("gpt2", {"position": Learned(offset=3)}, "position"),
        ("llama2_7b", {"position": Rotary(pairing="interleaved", fraction=1 / 3), "norm": LayerNorm()}, "norm"),
        ("llama2_7b", {"feedforward": Dense(31), "placement": "sandwich"}, "feedforward=Dense"),
        ("llama2_7b", {"attention__bias": True, "window": 3, "attention__sinks": True}, r"attention\.sinks"),
        ("qwen3_0_6b", {"attention__qk_norm": RMSNorm(eps=0.5)}, r"attention\.qk_norm"),
        ("mixtral_8x7b", {"feedforward__normalize": False, "attention__clip": 2.0, "window": 3}, "feedforward"),
        ("bert_base", {"head__transform": "relu"}, "head"),
        ("bert_base", {"placement": "pre"}, "placement"),
        ("bert_base", {"position": Learned(offset=4), "special__pad": 1}, "special.pad=1 cannot be written with"),
        ("distilbert_base", {"pooler": True}, "pooler"),
        ("t5_small", {"head__scale": 0.3}, "head"),
        ("t5_small", {"attention__scale": 0.3}, r"attention\.scale"),
        ("t5_small", {"position": Sinusoidal()}, "position=Sinusoidal"),
    ],
    ids=str,
)
def test_a_field_that_no_family_can_express_is_refused_by_name(name, changes, field):
    config = small(name, **changes)
    with pytest.raises(WeightsError, match=field) as refused:
        to_hf(config, build(config).state_dict())
    assert "\n" not in str(refused.value)
    assert "save with format='glass' (`glass convert --to glass`)" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("gpt2", {"position": Learned(offset=2), "feedforward__activation": "relu"}, "opt"),
        ("llama2_7b", {"position": Rotary(pairing="interleaved")}, "helium"),
        ("llama2_7b", {"position": Rotary(fraction=1 / 3)}, "phi3"),
        ("llama2_7b", {"feedforward": Dense(31, "relu2", bias=False)}, "arcee"),
        ("llama2_7b", {"norm": LayerNorm()}, "stablelm"),
        ("mistral_7b", {"window_layers": (0,)}, "ministral"),
        ("llama2_7b", {"residual_scale": 0.5}, "granite"),
        ("bloom_560m", {}, "bloom"),
    ],
    ids=str,
)
def test_the_first_family_that_reads_back_the_same_is_written(name, changes, kind):
    config = small(name, **changes)
    data, tensors = to_hf(config, build(config).state_dict())
    assert data["model_type"] == kind
    assert len(tensors) > 10


def test_the_family_of_a_loaded_model_comes_first():
    config = small("llama2_7b")
    state = build(config).state_dict()
    assert to_hf(config, state)[0]["model_type"] == "llama"
    assert to_hf(config, state, prefer="arcee")[0]["model_type"] == "llama", "arcee cannot represent it"
    assert to_hf(config, state, prefer="seed_oss")[0]["model_type"] == "seed_oss"


def test_defaults_filled_in_are_the_same_arithmetic():
    config = presets.llama_tiny()
    spelled = replace(config, n_kv_heads=2, d_head=24, attention__scale=24**-0.5, dropout=0.3)
    assert difference(config, spelled) is None
    assert difference(config, replace(config, n_layers=3)) == "n_layers"
    assert arithmetic(config)["attention.window"] == [None] * 4


def test_choosing_needs_no_weights():
    assert choose(presets.gpt2()).name == "GPT-2"
    with pytest.raises(WeightsError, match="glass"):
        choose(presets.bloom_560m())


def test_config_without_weights_is_the_language_model_it_describes():
    _, config = read_config(Source({**LLAMA_KEYS, "model_type": "llama", "tie_word_embeddings": True}, None))
    assert config.head is not None
    assert config.head.tied
    assert build(config)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 31)
