"""The hand-derived gradients against finite differences of the forward, over a grid of variants."""

from typing import Any

import numpy as np
import pytest
import torch

from glassformer import config as gf
from glassformer.reference import forward_seq2seq, random_params
from glassformer.reference.backward import loss, loss_and_gradients, loss_and_gradients_seq2seq, sgd
from glassformer.reference.backward_ops import cross_entropy

from . import peers

STEP = 1e-5
RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""A central difference with step h errs by h^2 f'''/6 + 1e-16 f/h. Losses here are about 3 and vary on a scale of 1,
so at h = 1e-5 both terms are near 1e-10; 1e-9 absolute and 1e-6 relative leave room, and any wrong term of a gradient
shows at 1e-3 or more."""


def decoder(**changes: Any) -> gf.DecoderConfig:
    values: dict[str, Any] = {
        "vocab_size": 13,
        "d_model": 10,
        "n_layers": 2,
        "attention": gf.Attention(6, n_kv_heads=2, d_head=4, d_value=3),
        "feedforward": gf.Dense(7),
        "max_len": 8,
    }
    return gf.DecoderConfig(**(values | changes))


def batch(V: int = 13, T: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    tokens, targets = generator.integers(0, V, (2, T)), generator.integers(0, V, (2, T))
    tokens[:, 3] = tokens[:, 0]  # a row of the table that is read twice
    targets[0, 1] = -100
    return tokens, targets


def assert_gradients(value: Any, params: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
    """Every parameter along two random unit directions u: (L(w + hu) - L(w - hu)) / 2h = grad . u."""
    assert set(gradients) == set(params)
    generator = np.random.default_rng(2)
    for name, weight in params.items():
        assert gradients[name].shape == weight.shape
        for _ in range(2):
            direction = generator.standard_normal(weight.shape)
            direction /= np.linalg.norm(direction)
            up, down = (value(params | {name: weight + sign * STEP * direction}) for sign in (1, -1))
            measured, derived = (up - down) / (2 * STEP), float((gradients[name] * direction).sum())
            assert abs(measured - derived) <= ABSOLUTE + RELATIVE * abs(measured), (name, measured, derived)


def assert_decoder_gradients(config: gf.ModelConfig, mask: np.ndarray | None = None) -> None:
    params = random_params(config)
    tokens, targets = batch()
    value, gradients = loss_and_gradients(config, params, tokens, targets, mask)
    assert value == loss(config, params, tokens, targets, mask)
    assert_gradients(lambda p: loss(config, p, tokens, targets, mask), params, gradients)


RMS = gf.RMSNorm()
VARIANTS: dict[str, gf.DecoderConfig] = {
    "gpt2-like": decoder(),
    "post": decoder(placement="post"),
    "parallel": decoder(placement="parallel", position=gf.Rotary(pairing="interleaved", fraction=0.5)),
    "rms": decoder(norm=RMS),
    "layer-norm-no-bias": decoder(norm=gf.LayerNorm(bias=False), placement="post"),
    "no-position": decoder(position=gf.NoPosition()),
    "learned-offset": decoder(position=gf.Learned(offset=2)),
    "sinusoidal": decoder(position=gf.Sinusoidal(), embedding=gf.Embedding(scale=3.0)),
    "rotary-halves": decoder(position=gf.Rotary()),
    "rotary-interleaved": decoder(position=gf.Rotary(pairing="interleaved")),
    "rotary-yarn": decoder(position=gf.Rotary(scaling=gf.YarnScaling(4.0, 16, 2.0, 0.5))),
    "alibi": decoder(position=gf.Alibi()),
    "t5": decoder(position=gf.T5Bias(4, 3)),
    "multi-head": decoder(attention=gf.Attention(2)),
    "multi-query-scale": decoder(attention=gf.Attention(3, n_kv_heads=1, d_head=2, scale=0.7)),
    "no-bias": decoder(attention=gf.Attention(2, bias=False, out_bias=True)),
    "qk-rms": decoder(attention=gf.Attention(6, n_kv_heads=3, d_head=4, qk_norm=RMS), position=gf.Rotary()),
    "qk-layer-norm": decoder(attention=gf.Attention(2, qk_norm=gf.LayerNorm())),
    "window": decoder(attention=gf.Attention(2, window=2, window_layers=(1,))),
    "embed-norm-segments": decoder(embedding=gf.Embedding(scale=2.0, n_segments=2, norm=True)),
    "untied-bias-scale": decoder(head=gf.Head(tied=False, bias=True, scale=0.3)),
    "tied-transform": decoder(head=gf.Head(bias=True, scale=0.7, transform="gelu")),
    "relu": decoder(feedforward=gf.Dense(7, "relu")),
    "relu2": decoder(feedforward=gf.Dense(7, "relu2", bias=False)),
    "gelu": decoder(feedforward=gf.Dense(7, "gelu")),
    "silu": decoder(feedforward=gf.Dense(7, "silu")),
    "tanh": decoder(feedforward=gf.Dense(7, "tanh")),
    "swiglu": decoder(feedforward=gf.Gated(7)),
    "geglu-bias": decoder(feedforward=gf.Gated(7, "gelu_tanh", bias=True)),
    "moe-normalised": decoder(feedforward=gf.MoE(4, 2, gf.Gated(5)), norm=RMS),
    "moe-raw": decoder(feedforward=gf.MoE(3, 1, gf.Dense(5), normalize=False)),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients_equal_finite_differences(config: gf.DecoderConfig) -> None:
    assert_decoder_gradients(config)


@pytest.mark.parametrize("position", [gf.Learned(), gf.Rotary(), gf.Alibi(), gf.T5Bias(4, 3)])
def test_gradients_with_left_padding_equal_finite_differences(position: gf.Position) -> None:
    mask = np.array([[False, False, True, True, True], [True] * 5])
    assert_decoder_gradients(decoder(position=position), mask)


def test_gradients_with_a_whole_pattern_equal_finite_differences() -> None:
    mask = np.random.default_rng(5).random((2, 5, 5)) < 0.5
    assert_decoder_gradients(decoder(position=gf.T5Bias(4, 3)), mask)


def test_every_single_coordinate_of_a_small_model() -> None:
    config = gf.DecoderConfig(
        vocab_size=5,
        d_model=4,
        n_layers=1,
        attention=gf.Attention(2, n_kv_heads=1),
        feedforward=gf.Gated(3),
        norm=RMS,
        position=gf.Rotary(),
        head=gf.Head(tied=False),
    )
    params = random_params(config)
    tokens, targets = batch(V=5)
    _, gradients = loss_and_gradients(config, params, tokens, targets)
    for name, weight in params.items():
        for index in np.ndindex(weight.shape):
            bump = np.zeros_like(weight)
            bump[index] = STEP
            measured = (
                loss(config, params | {name: weight + bump}, tokens, targets)
                - loss(config, params | {name: weight - bump}, tokens, targets)
            ) / (2 * STEP)
            assert abs(measured - gradients[name][index]) <= ABSOLUTE + RELATIVE * abs(measured), (name, index)


@pytest.mark.parametrize("position", [gf.T5Bias(8, 11), gf.Sinusoidal(layout="halves")])
def test_encoder_gradients_equal_finite_differences(position: gf.Position) -> None:
    config = gf.EncoderConfig(
        vocab_size=13,
        d_model=10,
        n_layers=2,
        attention=gf.Attention(2, window=3),
        feedforward=gf.Dense(7),
        position=position,
        placement="post",
        head=gf.Head(transform="gelu_tanh"),
    )
    assert_decoder_gradients(config, np.array([[True] * 5, [True, True, True, False, False]]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("position", [gf.T5Bias(8, 11), gf.Learned()])
def test_encoder_decoder_gradients_equal_finite_differences(placement: Any, position: gf.Position) -> None:
    config = gf.Seq2SeqConfig(
        vocab_size=13,
        d_model=10,
        n_layers=2,
        n_encoder_layers=1,
        attention=gf.Attention(2, n_kv_heads=1, qk_norm=RMS),
        feedforward=gf.Gated(7),
        position=position,
        placement=placement,
        max_len=8,
    )
    params = random_params(config)
    target, wanted = batch()
    source, source_mask = batch(T=7)[0], np.ones((2, 7), dtype=bool)
    source_mask[0, 4:] = False

    def value(p: dict[str, np.ndarray]) -> float:
        return cross_entropy(forward_seq2seq(config, p, source, target, source_mask=source_mask), wanted)

    found, gradients = loss_and_gradients_seq2seq(config, params, source, target, wanted, source_mask)
    assert found == value(params)
    assert_gradients(value, params, gradients)


def test_gpt2_gradients_equal_autograd() -> None:
    """A second witness: torch differentiates transformers' GPT-2 and finds the same gradient of the tied table."""
    tokens, targets = batch(V=23)
    with peers.in_float64():
        peer = peers.gpt2()
        logits = peer.model(torch.tensor(tokens)).logits
        theirs = torch.nn.functional.cross_entropy(logits.reshape(-1, 23), torch.tensor(targets).reshape(-1))
        theirs.backward()
    value, gradients = loss_and_gradients(peer.config, peer.params, tokens, targets)
    assert value == pytest.approx(theirs.item(), rel=1e-12)
    for ours, name in {
        "embed.tokens.weight": "transformer.wte.weight",
        "decoder.position.weight": "transformer.wpe.weight",
        "decoder.blocks.0.norm_attention.bias": "transformer.h.0.ln_1.bias",
        "decoder.blocks.1.feedforward.up.bias": "transformer.h.1.mlp.c_fc.bias",
    }.items():
        expected = peer.model.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradients[ours], expected, rtol=1e-9, atol=1e-12)


def test_loss_of_ignored_targets_does_not_count() -> None:
    config = decoder()
    params = random_params(config)
    tokens, targets = batch()
    kept = targets.copy()
    kept[1] = -100
    full = loss(config, params, tokens[:1], targets[:1])
    assert loss(config, params, tokens, kept) == pytest.approx(full, rel=1e-13)
    with pytest.raises(ValueError, match="mean loss is undefined"):
        loss(config, params, tokens, np.full_like(targets, -100))
    with pytest.raises(ValueError, match="ids from 0 to 12"):
        loss(config, params, tokens, np.full_like(targets, 13))
    with pytest.raises(ValueError, match="logits for"):
        loss(config, params, tokens, targets[:, :-1])


def test_untrained_uniform_model_loses_log_of_the_vocabulary() -> None:
    config = decoder(head=gf.Head(tied=False))
    params = random_params(config)
    params["head.weight"] = np.zeros_like(params["head.weight"])
    assert loss(config, params, *batch()) == pytest.approx(np.log(13), rel=1e-14)


@pytest.mark.parametrize("name", ["gpt2-like", "swiglu", "post"])
def test_a_whole_transformer_trains_without_autograd(name: str) -> None:
    config = VARIANTS[name]
    text = np.tile([3, 1, 4, 1, 5, 9], (2, 2))
    losses = sgd(config, random_params(config), text[:, :7], text[:, 1:8], steps=40, lr=0.1)
    assert len(losses) == 41
    assert losses[-1] < losses[0] / 2
