"""Encoders and encoder-decoders through the kernels: what torch computes with padding, without it."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings

from glassformer import config as c
from glassformer.generation import generate
from glassformer.kernels.cpu.decode import NativeDecoder, NativeEncoder, NativeError, unsupported_config
from glassformer.kernels.cpu.decode import encoder as module
from glassformer.kernels.cpu.decode.encoder import native_encoder
from glassformer.kernels.toolchain import cxx
from tests import variants
from tests.sampled import examples
from tests.variants import lively, ragged_mask, seq2seq, tokens

pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
LENGTHS = [13, 1, 7, 20, 4]


def float_model(config, std=0.3):
    return lively(config, std=std)[0].float()


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


def encoded(model, lengths, segments=None):
    """Hidden states by torch, with padding on the right, of the real tokens alone."""
    ids = tokens(len(lengths), max(lengths), vocab=model.config.vocab_size)
    mask = ragged_mask(lengths, max(lengths), "right")
    given = {} if segments is None else {"segments": segments}
    with torch.no_grad():
        states = model.encode(ids, mask, **given)
    texts = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
    return texts, [row[:n] for row, n in zip(states, lengths, strict=True)]


@settings(max_examples=examples(60))
@given(config=variants.encoders)
def test_texts_of_unequal_length_equal_the_padded_batch_for_every_known_variant(config):
    model = float_model(config)
    if unsupported_config(config) is not None:
        with pytest.raises(NativeError, match="use the model itself"):
            NativeEncoder(model)
        return
    kinds = tokens(len(LENGTHS), max(LENGTHS), seed=3, vocab=3) if config.embedding.n_segments else None
    texts, wanted = encoded(model, LENGTHS, kinds)
    segments = None if kinds is None else [kinds[i, :n].tolist() for i, n in enumerate(LENGTHS)]
    for found, want in zip(NativeEncoder(model).encode(texts, segments), wanted, strict=True):
        assert relative(found, want) < 3e-5


@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("position", [c.Learned(), c.Rotary(), c.T5Bias(buckets=8, max_distance=20), c.Alibi()])
@torch.no_grad()
def test_heads_wide_enough_for_panels_in_texts_of_many_blocks(position, window):
    """Values 32 wide take the way of blocks: windows to both sides, texts that begin in the middle of a block."""
    config = c.EncoderConfig(
        vocab_size=31, d_model=64, n_layers=2, attention=c.Attention(2, 1, d_head=32, window=window),
        feedforward=c.Dense(96), position=position, max_len=128, placement="post",
    )  # fmt: skip
    texts, wanted = encoded(model := float_model(config), [100, 3, 61, 29])
    for found, want in zip(NativeEncoder(model).encode(texts), wanted, strict=True):
        assert relative(found, want) < 3e-5


def test_parts_and_lower_precisions_are_near_the_same_states(monkeypatch):
    config = c.EncoderConfig(
        vocab_size=31, d_model=128, n_layers=2, attention=c.Attention(4), feedforward=c.Dense(256), max_len=64
    )
    texts, wanted = encoded(model := float_model(config, std=0.1), LENGTHS)
    monkeypatch.setattr(module, "CHUNK", 20)
    assert module._parts([13, 1, 7, 20, 4, 30]) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    bounds = {"float32": 2e-5, "bfloat16": 3e-2, "int8": 3e-2, "int4": 0.5}
    for precision, bound in bounds.items():
        found = NativeEncoder(model, precision).encode(texts)
        differences = [relative(one, want) for one, want in zip(found, wanted, strict=True)]
        assert 0 < max(differences) < bound, precision


@settings(max_examples=examples(40))
@given(config=variants.seq2seqs)
def test_an_encoder_decoder_steps_as_torch_for_every_known_variant(config):
    config = c.replace(config, special=c.Special(start=3))
    model = float_model(config)
    if unsupported_config(config) is not None:
        with pytest.raises(NativeError, match="engine='torch'"):
            NativeDecoder(model)
        return
    source, target = tokens(3, 9), torch.cat([torch.full((3, 1), 3), tokens(3, 8, seed=1)], 1)
    mask = ragged_mask([9, 2, 5], 9, "right")
    with torch.no_grad():
        wanted = model(source, target, mask)
    native = NativeDecoder(model, rows=3, capacity=9)
    found = [native.read([row[:n].tolist() for row, n in zip(source, (9, 2, 5), strict=True)])]
    found += [native.step(target[:, t]) for t in range(1, 9)]
    assert relative(torch.stack(found, 1), wanted) < 3e-5


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_of_an_encoder_decoder_gives_the_tokens_of_torch(beams, monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE", raising=False)
    model = float_model(seq2seq(max_len=64), std=0.5)
    sources = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7]]
    wanted = generate(model, sources, 24, beams=beams, engine="torch")
    found = generate(model, sources, 24, beams=beams, engine="native")
    assert found == wanted
    assert found.engine.engine == "native"
    assert generate(model, sources, 32, beams=beams).engine.engine == "native"


def test_wrong_settings_are_sentences():
    model = float_model(seq2seq())
    with pytest.raises(NativeError, match="use float32, bfloat16, int8, int4"):
        NativeEncoder(model, "int3")
    with pytest.raises(NativeError, match="start is not set"):
        NativeDecoder(float_model(seq2seq(special=c.Special()))).read([[1, 2]])


def encoder(**changes):
    base = c.EncoderConfig(
        vocab_size=31, d_model=64, n_layers=2, attention=c.Attention(4), feedforward=c.Dense(64), max_len=16
    )
    return c.replace(base, **changes)


def modules_of(model):
    return [*model.embed.modules(), *model.encoder.modules()]


def test_an_encoder_that_reads_weights_in_place_is_kept_while_they_stay_where_they_are():
    model = float_model(encoder())
    made = native_encoder(model, modules_of(model), "float32")
    assert native_encoder(model, modules_of(model), "float32") is made
    assert native_encoder(model, modules_of(model), "int8") is not made
    ids = [[3, 1, 4, 1, 5], [9] * 12]
    for parameter in model.encoder.parameters():  # read where they are
        parameter.data.mul_(-1.3)
        made = native_encoder(model, modules_of(model), "float32")
        fresh = NativeEncoder(copy.deepcopy(model))
        assert all(torch.equal(a, b) for a, b in zip(made.encode(ids), fresh.encode(ids), strict=True))
    weight = model.encoder.blocks[0].attention.q.weight
    weight.data = weight.data * 2  # now elsewhere
    moved = native_encoder(model, modules_of(model), "float32")
    assert moved is not made
    fresh = NativeEncoder(copy.deepcopy(model))
    assert all(torch.equal(a, b) for a, b in zip(moved.encode(ids), fresh.encode(ids), strict=True))


@pytest.mark.parametrize(
    "changes", [{"position": c.T5Bias(buckets=8)}, {"norm": c.RMSNorm(offset=1.0)}, {"position": c.Alibi()}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_with_copies_of_weights_is_made_again(changes, dtype):
    model = float_model(encoder(**changes)).to(dtype)
    made = native_encoder(model, modules_of(model), "float32")
    assert native_encoder(model, modules_of(model), "float32") is not made
    ids = [[3, 1, 4, 1, 5], [9] * 12]
    for parameter in model.encoder.parameters():
        parameter.data.mul_(-1.3)
        made = native_encoder(model, modules_of(model), "float32")
        fresh = NativeEncoder(copy.deepcopy(model))
        assert all(torch.equal(a, b) for a, b in zip(made.encode(ids), fresh.encode(ids), strict=True))


def test_a_kept_encoder_does_not_keep_a_model_alive():
    model = float_model(encoder())
    native_encoder(model, modules_of(model), "float32")
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
