"""Position schemes against transformers' own tables, and by hand where the literature is the only witness."""

import math

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from glassformer import config as gf
from glassformer.reference.positions import (
    alibi_bias,
    alibi_slopes,
    rotary_cos_sin,
    rotary_frequencies,
    rotate,
    sinusoidal,
    t5_bias,
    t5_bucket,
    t5_buckets,
)

FLOAT32 = {"rtol": 2e-6, "atol": 2e-6}  # the peer computes in float32


def test_sinusoidal_by_hand() -> None:
    """D = 4, base 100: w = 1 and 1/10."""
    cos_sin = sinusoidal(gf.Sinusoidal(base=100.0), np.array([[0, 3]]), 4)
    np.testing.assert_allclose(
        cos_sin[0], [[0, 1, 0, 1], [np.sin(3), np.cos(3), np.sin(0.3), np.cos(0.3)]], rtol=1e-14, atol=0
    )


def test_sinusoidal_halves_equal_marian() -> None:
    ours = sinusoidal(gf.Sinusoidal(layout="halves"), np.arange(50)[None], 22)[0]
    theirs = MarianSinusoidalPositionalEmbedding(50, 22).create_weight()
    np.testing.assert_allclose(ours, theirs.numpy(), **FLOAT32)


def test_sinusoidal_layouts_hold_the_same_numbers() -> None:
    position_ids = np.array([[0, 7, 3]])
    interleaved = sinusoidal(gf.Sinusoidal(), position_ids, 10)
    halves = sinusoidal(gf.Sinusoidal(layout="halves"), position_ids, 10)
    np.testing.assert_array_equal(interleaved[..., 0::2], halves[..., :5])
    np.testing.assert_array_equal(interleaved[..., 1::2], halves[..., 5:])


def rope(kind: str, **settings: float) -> hf.LlamaConfig:
    return hf.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | settings,
    )


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("original", [16, 256, 1024, 100_000, 10**9])  # the ends are clipped at both sides
def test_yarn_equals_transformers(truncate: bool, fraction: float, original: int) -> None:
    config = rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=original,
        truncate=truncate,
        partial_rotary_factor=fraction,
    )
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    rotary = gf.Rotary(fraction=fraction, scaling=gf.YarnScaling(4.0, original, truncate=truncate))
    ours, our_factor = rotary_frequencies(rotary, 32)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert our_factor == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize("beta_slow", [2.0, 1e-6])  # at 1e-6 the ramp would end past R - 1
def test_yarn_attention_factor_and_betas_equal_transformers(beta_slow: float) -> None:
    settings = {"beta_fast": 16.0, "beta_slow": beta_slow, "attention_factor": 0.9}
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](
        rope("yarn", factor=8.0, original_max_position_embeddings=1024, **settings)
    )
    ours, our_factor = rotary_frequencies(gf.Rotary(scaling=gf.YarnScaling(8.0, 1024, **settings)), 32)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert our_factor == factor == 0.9


@pytest.mark.parametrize("original", [64, 512, 8192])
def test_llama3_equals_transformers(original: int) -> None:
    config = rope(
        "llama3",
        factor=8.0,
        original_max_position_embeddings=original,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](config)
    ours, our_factor = rotary_frequencies(gf.Rotary(scaling=gf.Llama3Scaling(8.0, original)), 32)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert our_factor == factor == 1.0


def test_linear_equals_transformers() -> None:
    theirs, _ = ROPE_INIT_FUNCTIONS["linear"](rope("linear", factor=3.0))
    ours, _ = rotary_frequencies(gf.Rotary(scaling=gf.LinearScaling(3.0)), 32)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)


def test_ntk_equals_transformers_dynamic_at_that_length() -> None:
    """At length s their base grows by (f s/M - (f - 1))^(R/(R-2)): with f = 1 and s = 5 M that is 5^(R/(R-2))."""
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](rope("dynamic", factor=1.0), seq_len=5 * 4096)
    ours, _ = rotary_frequencies(gf.Rotary(scaling=gf.NTKScaling(5.0)), 32)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)


def test_ntk_keeps_the_first_frequency_and_divides_the_last() -> None:
    plain, _ = rotary_frequencies(gf.Rotary(), 32)
    scaled, _ = rotary_frequencies(gf.Rotary(scaling=gf.NTKScaling(5.0)), 32)
    assert scaled[0] == plain[0] == 1
    assert scaled[-1] == pytest.approx(plain[-1] / 5, rel=1e-13)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_rotation_by_hand_rotates_its_own_pairs(pairing: str) -> None:
    """K = 6 with 4 rotated, base 100: planes turn by p and p/10; p = 2 here. A unit vector shows where it goes."""
    rotary = gf.Rotary(base=100.0, pairing=pairing, fraction=4 / 6)  # type: ignore[arg-type]
    cos, sin = rotary_cos_sin(rotary, 6, np.array([[2]]))
    pairs = [(0, 2), (1, 3)] if pairing == "halves" else [(0, 1), (2, 3)]
    for (first, second), angle in zip(pairs, (2, 0.2), strict=True):
        expected = np.zeros(6)
        expected[first], expected[second] = math.cos(angle), math.sin(angle)
        np.testing.assert_allclose(rotate(rotary, np.eye(6)[first][None, None, None], cos, sin)[0, 0, 0], expected)
    untouched = np.eye(6)[5][None, None, None]
    np.testing.assert_array_equal(rotate(rotary, untouched, cos, sin), untouched)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_rotation_keeps_lengths_and_makes_products_relative(pairing: str) -> None:
    rotary = gf.Rotary(pairing=pairing)  # type: ignore[arg-type]
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8))

    def turned(x: np.ndarray, place: int) -> np.ndarray:
        return rotate(rotary, x, *rotary_cos_sin(rotary, 8, np.array([[place]])))

    assert np.linalg.norm(turned(q, 11)) == pytest.approx(np.linalg.norm(q), rel=1e-14)
    assert (turned(q, 9) * turned(k, 4)).sum() == pytest.approx((turned(q, 105) * turned(k, 100)).sum(), rel=1e-11)


@pytest.mark.parametrize("H", [1, 2, 3, 5, 8, 12, 16, 20])
def test_alibi_slopes_equal_bloom(H: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), H, torch.float32)[:, 0, 1]  # slope times position 1
    np.testing.assert_allclose(alibi_slopes(H), theirs.numpy(), rtol=1e-6)


def test_alibi_bias_by_hand() -> None:
    bias = alibi_bias(np.array([[0, 1, 4]]), 2)  # slopes 1/16 and 1/256
    np.testing.assert_array_equal(bias[0, 0] * -16, [[0, 1, 4], [1, 0, 3], [4, 3, 0]])
    np.testing.assert_array_equal(bias[0, 1] * -256, [[0, 1, 4], [1, 0, 3], [4, 3, 0]])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 11), (16, 50), (4, 3), (64, 256), (12, 40)])
def test_t5_buckets_equal_transformers(bidirectional: bool, buckets: int, max_distance: int) -> None:
    offsets = np.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(torch.tensor(offsets), bidirectional, buckets, max_distance)
    ours = [t5_bucket(int(offset), gf.T5Bias(buckets, max_distance), bidirectional) for offset in offsets]
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_t5_bias_reads_key_minus_query_of_each_head() -> None:
    position = gf.T5Bias(8, 11)
    buckets = t5_buckets(position, np.array([[0, 1, 2]]), bidirectional=True)
    np.testing.assert_array_equal(buckets[0], [[0, 5, 6], [1, 0, 5], [2, 1, 0]])  # upper half: the key comes after
    buckets = t5_buckets(position, np.array([[0, 1, 2]]), bidirectional=False)
    np.testing.assert_array_equal(buckets[0], [[0, 0, 0], [1, 0, 0], [2, 1, 0]])
    table = np.arange(24.0).reshape(8, 3)
    bias = t5_bias(table, buckets)
    assert bias.shape == (1, 3, 3, 3)
    assert bias[0, 2, 2, 1] == table[1, 2]
