"""GPT-2's layout: every mistake has its size, and released weights are run where they are."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from glassformer.reference import forward
from glassformer.theory.claims.architecture import gpt2
from glassformer.theory.claims.claim import Lab
from tests.bugs.mutants import MUTANTS

SPOILT = (
    "mask_flipped", "scale_one_over_d", "no_scale", "positions_shifted", "values_transposed", "query_heads_rolled",
    "queries_and_keys_swapped", "gelu_erf_for_tanh", "unbiased_variance", "eps_times_1000", "final_norm_missing",
    "post_for_pre_norm",
)  # fmt: skip


def test_eleven_mistakes_are_seen_at_std_02_and_one_is_not_at_002():
    large, small = gpt2.sensitivities(0.2, 0), gpt2.sensitivities(0.02, 0)
    assert len(large) == 11
    assert min(large.values()) > 1e-4
    assert [name for name, value in small.items() if value <= 1e-4] == ["erf-GELU"]


def test_the_reader_and_the_second_conversion_agree():
    tensors, tokens = gpt2.published(5, 0.2), gpt2.text(5, 7)
    expected = forward(gpt2.reference_config(), gpt2.oracle_params(tensors), tokens.numpy())
    assert gpt2.gap(gpt2.engine(tensors)(tokens), expected) < 1e-10


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_engine_is_caught(name):
    tensors, tokens = gpt2.published(0, 0.2), gpt2.text(0, 16)
    expected = forward(gpt2.reference_config(), gpt2.oracle_params(tensors), tokens.numpy())
    with MUTANTS[name]():
        assert gpt2.gap(gpt2.engine(tensors)(tokens), expected) > gpt2.BOUND


def test_a_norm_with_unbiased_variance_is_torchs_formula():
    norm = gpt2.UnbiasedNorm(6, gpt2.c.LayerNorm(1e-5))
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(norm(x).var(-1), torch.ones(4), atol=1e-4)


@pytest.mark.parametrize("spoilt", [False, True])
def test_released_weights_are_run_where_a_folder_is_named(tmp_path, monkeypatch, spoilt):
    tensors = gpt2.published(1, 0.2)
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, tmp_path / "model.safetensors")
    written = gpt2.CONFIG | {"activation_function": "relu" if spoilt else "gelu_new"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    monkeypatch.setenv(gpt2.REAL, str(tmp_path))
    monkeypatch.setattr(
        gpt2, "forward", lambda config, params, tokens: forward(gpt2.reference_config(), params, tokens)
    )
    assert gpt2._released(Lab()).passed is not spoilt


def test_without_a_folder_the_part_is_skipped(monkeypatch):
    monkeypatch.delenv(gpt2.REAL, raising=False)
    found = gpt2._released(Lab())
    assert found.verdict == "skip"
    assert gpt2.REAL in found.remedy
