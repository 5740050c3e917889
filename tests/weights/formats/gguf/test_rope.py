"""Rotary positions in metadata read back as they were, and what llama.cpp does not have is refused."""

import pytest
import torch

from glassformer.config import Llama3Scaling, Rotary
from glassformer.model.positions import rotary_frequencies
from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf.rope import ORIGINAL, frequency_factors, read_rope, recognize_factors, write_rope

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, ORIGINAL: 8192}
WHOLE = {"partial_rotary_factor": 1.0}
"""Is always read, because some families rotate a part of each head by default."""
TABLES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 2048, "beta_fast": 16.0, "beta_slow": 2.0},
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["rope_type"])
def test_there_and_back(table):
    sizes = {"embedding_length": 64, "attention.head_count": 4}
    assert read_rope(write_rope({**SIZES, "rope_parameters": table}) | sizes)["rope_parameters"] == {**table, **WHOLE}


def test_the_attention_factor_of_yarn_is_relative_to_its_default_there():
    table = TABLES[2] | {"attention_factor": 1.5}
    written = write_rope({**SIZES, "rope_parameters": table})
    assert written["rope.scaling.attn_factor"] == pytest.approx(1.5 / 1.1386294361)
    back = read_rope(written | {"attention.key_length": 16})
    assert back["rope_parameters"]["attention_factor"] == pytest.approx(1.5)


def test_the_divisors_of_llama_3_are_those_of_our_engine_and_are_recognised():
    data = {**SIZES, "head_dim": 64, "rope_parameters": LLAMA3}
    factors = frequency_factors(data)
    plain = {**data, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert recognize_factors(factors, plain)["rope_parameters"] == LLAMA3
    device = torch.device("cpu")
    scaled, _ = rotary_frequencies(Rotary(base=500000.0, scaling=Llama3Scaling(8.0, 8192)), 64, device)
    unscaled, _ = rotary_frequencies(Rotary(base=500000.0), 64, device)
    assert torch.allclose(unscaled / factors, scaled, rtol=1e-6)
    assert (factors.min(), factors.max()) == (1.0, 8.0)
    assert frequency_factors(plain) is None


def test_layers_with_a_window_have_their_own_base_and_heads_may_be_rotated_in_part():
    tables = {"full_attention": TABLES[1], "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    written = write_rope({**SIZES, "rope_parameters": tables})
    assert (written["rope.freq_base"], written["rope.freq_base_swa"]) == (1e4, 100.0)
    tables["full_attention"] = TABLES[1] | WHOLE
    assert read_rope(written | {"attention.key_length": 16})["rope_parameters"] == tables
    with pytest.raises(WeightsError, match="'linear' of layers with a window"):
        write_rope({**SIZES, "rope_parameters": {"full_attention": TABLES[0], "sliding_attention": TABLES[1]}})
    part = TABLES[0] | {"partial_rotary_factor": 0.5}
    written = write_rope({**SIZES, "rope_parameters": part})
    assert written["rope.dimension_count"] == 8
    assert read_rope(written | {"embedding_length": 64, "attention.head_count": 4})["rope_parameters"] == part


def test_other_divisors_and_scalings_are_refused():
    plain = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(WeightsError, match="not those of Llama 3"):
        recognize_factors(torch.linspace(1, 7, 8), plain)
    with pytest.raises(WeightsError, match="'longrope' cannot be written"):
        write_rope({**SIZES, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}})
    with pytest.raises(WeightsError, match="'longrope'"):
        read_rope({"rope.scaling.type": "longrope"})
    assert read_rope({})["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert read_rope({"rope.scale_linear": 2.0})["rope_parameters"]["factor"] == 2.0
