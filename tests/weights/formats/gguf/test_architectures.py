"""Metadata reads back as the config.json that it was made of, and unknown architectures are refused by name."""

import gguf
import pytest

from glassformer.weights import WeightsError, families
from glassformer.weights.formats.gguf.architectures import ARCHITECTURES, find, for_type
from glassformer.weights.formats.gguf.write import config_json, describe
from tests.weights.formats.gguf.models import CASES, random


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    config = CASES[case]
    data = config_json(config, random(config).state_dict())
    architecture = for_type(data["model_type"])
    back = architecture.config(architecture.metadata(data), ())
    skipped = ("model_type", "rope_parameters", "attention_bias", "mlp_bias", *architecture.flags)  # tensors decide
    for key, value in back.items():
        if key in architecture.fixed and key not in skipped:
            assert data.get(key, value) in architecture.fixed[key], key  # names of the same function
        elif key not in skipped and data.get(key) is not None:
            assert value == pytest.approx(data[key]), key
    assert back["model_type"] in architecture.types


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_that_the_library_has_for_the_architecture(case):
    """The table of the library, from Hugging Face's names to those of llama.cpp, agrees with ours."""
    model = describe(CASES[case], random(CASES[case]).state_dict())
    (kind,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model.architecture.name]
    layers = range(model.config.n_layers)
    known = {gguf.TENSOR_NAMES[tensor].format(bid=i) for tensor in gguf.MODEL_TENSORS[kind] for i in layers}
    names = gguf.get_tensor_name_map(kind, len(layers))
    theirs = {move.ours: move.theirs for move in families.moves_to_hf(model.config)[1]}
    compared = 0
    for full, move in model.moves.items():
        name, _, part = full.rpartition(".")
        assert name in known
        if move.ours in theirs:  # stacked experts and norms of heads are several tensors there
            other = theirs[move.ours].removesuffix(f".{part}")
            assert name in (names.get_name(other), names.get_name(other.removeprefix("transformer.")))  # BLOOM has none
            compared += 1
    assert compared > 5 * len(layers)


def test_unknown_names():
    with pytest.raises(
        WeightsError, match=r"general\.architecture='mamba' is not known: known are gpt2, starcoder, llama"
    ):
        find("mamba")
    with pytest.raises(WeightsError, match="a bert model cannot be written as GGUF"):
        for_type("bert")
    assert [find(a.name) for a in ARCHITECTURES] == list(ARCHITECTURES)
