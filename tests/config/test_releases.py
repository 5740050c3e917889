"""Released models: as many parameters as in transformers, which builds them without memory."""

import json

import pytest
import torch
import transformers

from glassformer.config import presets
from glassformer.model import build
from glassformer.sizing import count
from glassformer.weights.families import to_hf

OURS = ("nano", "shakespeare", "llama_tiny", "moe_tiny", "transformer_base", "transformer_big")
"""Presets of models that transformers does not have."""
OTHER_HEAD = ("bert_base", "bert_large", "minilm_l6", "t5_v1_1_small")
"""transformers has no masked-LM head next to a pooler, and ties the head of a new T5."""
NAMES = [name for name in presets.ALL if name not in OURS + OTHER_HEAD]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_count_equals_that_of_transformers(name):
    config = presets.get(name)
    small = presets.get(
        name, n_layers=min(config.n_layers, 7), **({"n_encoder_layers": 7} if "bart" in name or "t5" in name else {})
    )
    data, _ = to_hf(small, build(small, device="meta").state_dict())
    kind = getattr(transformers, data["architectures"][0])
    with torch.device("meta"):
        theirs = kind(kind.config_class.from_dict(json.loads(json.dumps(data))))
    parameters = {id(p): p.numel() for p in theirs.parameters()}
    assert sum(parameters.values()) == count(small)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_of_the_same_kind_can_be_made(name):
    config = presets.get(name, n_layers=2, vocab_size=97)
    assert config.n_layers == 2
    assert count(config) < count(presets.get(name))
