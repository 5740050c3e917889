"""A whole forward: against transformers in float64, and by what must hold of any Transformer."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from glassformer import config as gf
from glassformer.reference import encode, forward, forward_seq2seq, pool, prefix_mask, random_params
from glassformer.reference.arrays import Array

from . import peers

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}  # float64 on both sides: 1e-16 times a few hundred roundings, with room


def tokens(B: int = 2, T: int = 7, V: int = 23, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, T))


DECODERS: list[Callable[[], peers.Peer]] = [
    peers.gpt2,
    peers.llama,
    peers.qwen3,
    peers.mixtral,
    peers.gptj,
    peers.bloom,
]


@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_decoder_equals_transformers(make: Callable[[], peers.Peer]) -> None:
    ids = tokens()
    with peers.in_float64(), torch.no_grad():
        peer = make()
        theirs = peer.model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(forward(peer.config, peer.params, ids), theirs, **TOLERANCE)


@pytest.mark.parametrize("make", [peers.gpt2, peers.llama, peers.bloom], ids=lambda make: make.__name__)
def test_left_padded_decoder_equals_transformers_on_real_tokens(make: Callable[[], peers.Peer]) -> None:
    ids, mask = tokens(), np.ones((2, 7), dtype=bool)
    mask[0, :3] = False
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with peers.in_float64(), torch.no_grad():
        peer = make()
        extra = {} if make is peers.bloom else {"position_ids": torch.tensor(positions)}  # bloom counts by itself
        theirs = peer.model(torch.tensor(ids), attention_mask=torch.tensor(mask).long(), **extra).logits.numpy()
    ours = forward(peer.config, peer.params, ids, mask=mask)
    np.testing.assert_allclose(ours[mask], theirs[mask], **TOLERANCE)


SCALINGS: dict[str, tuple[dict, gf.Rotary]] = {
    "linear": ({"factor": 3.0}, gf.Rotary(scaling=gf.LinearScaling(3.0))),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5},
        gf.Rotary(scaling=gf.YarnScaling(4.0, 16, 2.0, 0.5)),
    ),
    "llama3": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        gf.Rotary(scaling=gf.Llama3Scaling(8.0, 64)),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotary_model_equals_transformers(kind: str) -> None:
    rope, rotary = SCALINGS[kind]
    ids = tokens(T=11)
    with peers.in_float64(), torch.no_grad():
        peer = peers.llama({"rope_type": kind, "rope_theta": 10000.0} | rope, rotary)
        theirs = peer.model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(forward(peer.config, peer.params, ids), theirs, **TOLERANCE)


def test_bert_equals_transformers_with_segments_and_padding() -> None:
    ids, mask = tokens(), np.ones((2, 7), dtype=bool)
    mask[1, 5:] = False
    segments = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0]])
    record: dict[str, Array] = {}
    with peers.in_float64(), torch.no_grad():
        peer = peers.bert()
        theirs = peer.model(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask).long(),
            token_type_ids=torch.tensor(segments),
            output_attentions=True,
        )
    ours = forward(peer.config, peer.params, ids, mask=mask, segments=segments, record=record)
    np.testing.assert_allclose(ours[mask], theirs.logits.numpy()[mask], **TOLERANCE)
    pattern = record["blocks.1.attention.pattern"].transpose(0, 2, 1, 3)[mask]
    np.testing.assert_allclose(pattern, theirs.attentions[1].numpy().transpose(0, 2, 1, 3)[mask], **TOLERANCE)


@pytest.mark.parametrize("gated", [False, True])
def test_t5_equals_transformers_with_a_padded_source(gated: bool) -> None:
    source, target, source_mask = tokens(T=9), tokens(T=13, seed=1), np.ones((2, 9), dtype=bool)
    source_mask[0, 6:] = False
    with peers.in_float64(), torch.no_grad():
        peer = peers.t5(gated)
        theirs = peer.model(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(source_mask).long(),
            decoder_input_ids=torch.tensor(target),
        )
    ours = forward_seq2seq(peer.config, peer.params, source, target, source_mask=source_mask)
    np.testing.assert_allclose(ours, theirs.logits.numpy(), **TOLERANCE)
    memory = encode(peer.config, peer.params, source, mask=source_mask)
    np.testing.assert_allclose(memory[source_mask], theirs.encoder_last_hidden_state.numpy()[source_mask], **TOLERANCE)


# What must hold of any Transformer. Dimensions are unequal primes where the config allows it.

POSITIONS: dict[str, gf.Position] = {
    "none": gf.NoPosition(),
    "learned": gf.Learned(offset=2),
    "sinusoidal": gf.Sinusoidal(),
    "rotary": gf.Rotary(),
    "alibi": gf.Alibi(),
    "t5": gf.T5Bias(8, 11),
}


def decoder(**changes: object) -> gf.DecoderConfig:
    values: dict = {
        "vocab_size": 23,
        "d_model": 10,
        "n_layers": 2,
        "attention": gf.Attention(6, n_kv_heads=2, d_head=4, d_value=3),
        "feedforward": gf.Dense(7),
        "max_len": 17,
    }
    return gf.DecoderConfig(**(values | changes))


def encoder(**changes: object) -> gf.EncoderConfig:
    values: dict = {
        "vocab_size": 23,
        "d_model": 10,
        "n_layers": 2,
        "attention": gf.Attention(6, n_kv_heads=2, d_head=4, d_value=3),
        "feedforward": gf.Dense(7),
        "max_len": 17,
    }
    return gf.EncoderConfig(**(values | changes))


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS.keys())
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_future_tokens_do_not_change_past_logits(position: gf.Position, placement: str) -> None:
    config = decoder(position=position, placement=placement)
    params, ids = random_params(config), tokens()
    before = forward(config, params, ids)
    changed = ids.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 23
    after = forward(config, params, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before[:, 4:] - after[:, 4:]).max(axis=-1) > 1e-9).all()


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS.keys())
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_real_tokens(position: gf.Position, side: str) -> None:
    for config in (decoder(position=position), encoder(position=position)):
        params, ids = random_params(config), tokens()
        pad = [(0, 0), (3, 0) if side == "left" else (0, 3)]
        padded = np.pad(ids, pad, constant_values=5)
        mask = np.pad(np.ones_like(ids, dtype=bool), pad)
        padded_logits = forward(config, params, padded, mask=mask)
        np.testing.assert_allclose(padded_logits[mask].reshape(2, 7, 23), forward(config, params, ids), **TOLERANCE)


@pytest.mark.parametrize("position", [gf.Rotary(), gf.Alibi(), gf.T5Bias(8, 11), gf.NoPosition()])
def test_relative_positions_do_not_see_a_shift(position: gf.Position) -> None:
    config = decoder(position=position)
    params, ids = random_params(config), tokens()
    shifted = np.broadcast_to(np.arange(7) + 5, (2, 7))
    np.testing.assert_allclose(
        forward(config, params, ids), forward(config, params, ids, positions=shifted), **TOLERANCE
    )


@pytest.mark.parametrize("position", [gf.Learned(), gf.Sinusoidal()])
def test_absolute_positions_see_a_shift(position: gf.Position) -> None:
    config = decoder(position=position)
    params, ids = random_params(config), tokens()
    shifted = np.broadcast_to(np.arange(7) + 5, (2, 7))
    assert np.abs(forward(config, params, ids) - forward(config, params, ids, positions=shifted)).max() > 1e-3


def test_encoder_without_positions_is_permutation_equivariant() -> None:
    config = encoder(position=gf.NoPosition())
    params, ids = random_params(config), tokens()
    order = np.random.default_rng(3).permutation(7)
    np.testing.assert_allclose(
        forward(config, params, ids[:, order]), forward(config, params, ids)[:, order], **TOLERANCE
    )


def test_window_reaches_only_on_the_layers_that_have_it() -> None:
    attention = gf.Attention(6, window=2, window_layers=(1,), d_head=4)
    config = decoder(attention=attention)
    record: dict[str, Array] = {}
    forward(config, random_params(config), tokens(), record=record)
    index = np.arange(7)
    outside = index[None, :] <= index[:, None] - 2
    assert (record["blocks.0.attention.pattern"][:, :, outside] > 0).all()
    assert (record["blocks.1.attention.pattern"][:, :, outside] == 0).all()


def test_causality_and_window_go_by_index_not_by_position() -> None:
    config = decoder(position=gf.Alibi(), attention=gf.Attention(6, window=3, d_head=4))
    record: dict[str, Array] = {}
    forward(config, random_params(config), tokens(), positions=np.full((2, 7), 3), record=record)
    index = np.arange(7)
    gap = index[:, None] - index[None, :]
    np.testing.assert_array_equal(record["blocks.0.attention.pattern"][0, 0] > 0, (gap >= 0) & (gap < 3))


def test_whole_pattern_replaces_the_causal_one() -> None:
    config = decoder()
    params, ids = random_params(config), tokens()
    mask = prefix_mask([3, 3], 7)
    before = forward(config, params, ids, mask=mask)
    changed = ids.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 23  # inside the prefix: the first token sees it
    after = forward(config, params, changed, mask=mask)
    assert np.abs(before[:, 0] - after[:, 0]).max() > 1e-9
    causal = np.broadcast_to(np.tri(7, dtype=bool), (2, 7, 7))
    np.testing.assert_array_equal(forward(config, params, ids, mask=causal), forward(config, params, ids))


def test_cross_attention_skips_source_padding_and_knows_no_positions() -> None:
    config = gf.Seq2SeqConfig(
        vocab_size=23,
        d_model=10,
        n_layers=2,
        n_encoder_layers=1,
        attention=gf.Attention(2, qk_norm=gf.LayerNorm()),
        feedforward=gf.Dense(7),
        position=gf.NoPosition(),
        norm=gf.LayerNorm(bias=False),
        placement="post",
    )
    params, source, target = random_params(config), tokens(T=5), tokens(T=7, seed=1)
    logits = forward_seq2seq(config, params, source, target)
    order = np.array([4, 2, 0, 1, 3])
    np.testing.assert_allclose(forward_seq2seq(config, params, source[:, order], target), logits, **TOLERANCE)
    padded, real = np.pad(source, [(0, 0), (2, 0)]), np.pad(np.ones((2, 5), dtype=bool), [(0, 0), (2, 0)])
    np.testing.assert_allclose(forward_seq2seq(config, params, padded, target, source_mask=real), logits, **TOLERANCE)


def test_record_names_both_stacks_of_an_encoder_decoder() -> None:
    record: dict[str, Array] = {}
    peer = peers.t5()
    forward_seq2seq(peer.config, peer.params, tokens(T=5), tokens(T=3), record=record)
    assert record["encoder.blocks.1.attention.pattern"].shape == (2, 3, 5, 5)
    assert record["decoder.blocks.2.cross.pattern"].shape == (2, 3, 3, 5)
    assert record["decoder.blocks.2.attention.pattern"].shape == (2, 3, 3, 3)
    for site, value in record.items():
        if site.endswith("pattern"):
            np.testing.assert_allclose(value.sum(axis=-1), 1, rtol=1e-12)


def test_head_scale_multiplies_before_the_bias() -> None:
    config = decoder(head=gf.Head(tied=False, bias=True, scale=0.5))
    params, ids = random_params(config), tokens()
    hidden = encode(config, params, ids)
    expected = 0.5 * hidden @ params["head.weight"].T + params["head.bias"]
    np.testing.assert_allclose(forward(config, params, ids), expected, **TOLERANCE)


def test_pooler_reads_the_first_token() -> None:
    config = encoder(pooler=True)
    params, ids = random_params(config), tokens()
    hidden = encode(config, params, ids)
    expected = np.tanh(hidden[:, 0] @ params["pooler.weight"].T + params["pooler.bias"])
    np.testing.assert_allclose(pool(config, params, hidden), expected, **TOLERANCE)
    with pytest.raises(ValueError, match="no pooler"):
        pool(encoder(), random_params(encoder()), hidden)


def test_errors_name_what_is_wrong() -> None:
    config = decoder()
    params = random_params(config)
    with pytest.raises(ValueError, match="vocabulary has 23"):
        forward(config, params, [[23]])
    with pytest.raises(ValueError, match="shape"):
        forward(config, params, [1, 2])
    with pytest.raises(ValueError, match="max_len=17"):
        forward(config, params, tokens(T=18))
    with pytest.raises(ValueError, match="no segment table"):
        forward(config, params, tokens(), segments=np.zeros((2, 7), dtype=int))
    with pytest.raises(ValueError, match="count from 0"):
        forward(config, params, tokens(), positions=np.full((2, 7), -1))
    with pytest.raises(ValueError, match="positions must be integers"):
        forward(config, params, tokens(), positions=np.zeros(7, dtype=int))
    with pytest.raises(ValueError, match="head=None"):
        forward(decoder(head=None), random_params(decoder(head=None)), tokens())
    peer = peers.t5()
    with pytest.raises(ValueError, match="forward_seq2seq"):
        forward(peer.config, peer.params, tokens())
    with pytest.raises(ValueError, match="source_mask"):
        forward_seq2seq(peer.config, peer.params, tokens(T=5), tokens(), source_mask=np.ones((2, 5, 5)))
