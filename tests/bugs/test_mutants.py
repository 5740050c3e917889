"""Each mutant of the engine changes logits where it should, leaves the rest alone, and undoes itself."""

import functools

import pytest
import torch

from glassformer import config as c
from glassformer.model import attention, context, layers, positions
from glassformer.model.attention import Attention
from glassformer.model.block import PreNormBlock, Stack
from glassformer.model.cache import Cache
from glassformer.model.layers import LayerNorm, RMSNorm
from glassformer.model.positions import Alibi
from glassformer.reference import forward
from tests.bugs.mutants import MUTANTS
from tests.variants import decoder, lively, ragged_mask, seq2seq, tokens

PLAIN = decoder(attention=c.Attention(n_heads=6, d_head=4))
ROTARY = decoder(position=c.Rotary())
CONFIGS = {
    "plain": PLAIN,
    "grouped": decoder(),
    "rotary": ROTARY,
    "alibi": decoder(position=c.Alibi()),
    "t5": decoder(position=c.T5Bias(buckets=8, max_distance=20)),
    "sinusoidal": decoder(position=c.Sinusoidal()),
    "rms": decoder(norm=c.RMSNorm(eps=1e-5), position=c.NoPosition()),
}
DECODERS = tuple(CONFIGS)
CONFIGS["pair"] = seq2seq(position=c.Rotary(), norm=c.RMSNorm(), feedforward=c.Gated(d_ff=11))
# Where a mutant shows; the others show everywhere (positions_shifted_when_cached only through a cache).
CONCERNS = {
    "positions_shifted": {"plain", "grouped", "t5", "sinusoidal"},  # ALiBi's shift is constant in a row of scores
    "positions_shifted_when_cached": set(),
    "queries_and_keys_swapped": {"plain"},
    "unbiased_variance": {"plain", "grouped", "rotary", "alibi", "t5", "sinusoidal"},
    "rotary_sign": {"rotary"},
    "rotary_keys_only": {"rotary"},
    "values_rotated": {"rotary"},
    "alibi_sign": {"alibi"},
    "t5_direction": {"t5"},
    "sinusoids_turned": {"sinusoidal"},
}
TARGETS = (Attention, PreNormBlock, Cache, Stack, LayerNorm, RMSNorm, Alibi, attention, context, layers, positions)
each_mutant = pytest.mark.parametrize("name", MUTANTS)


@functools.cache
def model_of(kind):
    """A float64 model and the oracle's parameters; forwards leave both as they are."""
    return lively(CONFIGS[kind])


@torch.no_grad()
def logits(model):
    return model(tokens(3, 13), mask=ragged_mask([13, 9, 6], 13, "left"))[:, 7:]


@torch.no_grad()
def cached_logits(model):
    cache, given = model.new_cache(), tokens(2, 9)
    return torch.cat([model(piece, cache=cache) for piece in given.split([4, 3, 1, 1], dim=1)], 1)


def engine():
    """Everything a mutant may touch, by identity; what Python itself keeps on a class is left out."""
    return [{key: value for key, value in vars(target).items() if not key.startswith("__")} for target in TARGETS]


@pytest.mark.sample(50)
@each_mutant
@pytest.mark.parametrize("kind", DECODERS)
def test_a_mutant_changes_the_logits_it_concerns_and_no_others(name, kind):
    model, _ = model_of(kind)
    before = logits(model)
    with MUTANTS[name]():
        during = logits(model)
    assert torch.equal(logits(model), before)
    # tanh and erf GELU differ by at most 5e-4, eps and D - 1 by more: 1e-7 is far above float64's rounding
    moved = float((during - before).abs().max())
    if kind in CONCERNS.get(name, DECODERS):
        assert moved > 1e-7
    else:
        # the shift of all positions passes through the angles' rounding
        assert moved < 1e-9


@each_mutant
def test_a_mutant_is_undone_even_when_the_block_fails(name):
    before = engine()

    def fail():
        raise RuntimeError("inside")

    with MUTANTS[name]():
        assert engine() != before
    with pytest.raises(RuntimeError, match="inside"), MUTANTS[name]():
        fail()
    after = engine()
    assert all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(before, after, strict=True))


def test_shifting_cached_positions_shows_only_through_the_cache():
    model, _ = model_of("plain")
    full, stepped = logits(model), cached_logits(model)
    with MUTANTS["positions_shifted_when_cached"]():
        assert torch.equal(logits(model), full)
        moved = (cached_logits(model) - stepped).abs().amax((0, 2))
    assert float(moved[:4].max()) == 0
    assert float(moved[4:].min()) > 1e-3


@each_mutant
def test_an_encoder_decoder_still_runs_in_a_mutant(name):
    """A mutant that crashes would be noticed by any check; it has to be wrong, not broken."""
    model, _ = model_of("pair")
    with MUTANTS[name](), torch.no_grad():
        assert model(tokens(2, 7), tokens(2, 5, seed=1)).isfinite().all()
        cache = model.new_cache()
        for piece in tokens(2, 5, seed=1).split([2, 1, 2], dim=1):
            assert model(tokens(2, 7), piece, cache=cache).isfinite().all()


@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "positions_shifted_when_cached"])
def test_the_oracle_does_not_follow_a_mutant(name):
    """The reference shares nothing with the engine: comparing the two catches every mutant of the full pass."""
    kind = sorted(CONCERNS.get(name, DECODERS))[0]
    model, params = model_of(kind)
    due = oracle(model, params)
    assert float((logits(model) - due).abs().max()) < 1e-9
    with MUTANTS[name]():
        assert torch.equal(oracle(model, params), due)
        assert float((logits(model) - due).abs().max()) > 1e-7


def oracle(model, params):
    mask = ragged_mask([13, 9, 6], 13, "left").numpy()
    return torch.from_numpy(forward(model.config, params, tokens(3, 13).numpy(), mask=mask))[:, 7:]
