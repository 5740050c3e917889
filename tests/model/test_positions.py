"""Position schemes: hand-computed values, their defining properties, and their cost in precision."""

import math

import pytest
import torch

from glassformer import config as c
from glassformer import reference
from glassformer.generation import generate
from glassformer.model.positions import (
    Rotary,
    Rotation,
    alibi_slopes,
    apply_rotation,
    rotary_frequencies,
    sinusoids,
    t5_buckets,
)
from tests import variants
from tests.model.test_attention import Wanting
from tests.variants import lively, tokens

CPU = torch.device("cpu")


def rotation(spec: c.Rotary, width: int, positions: torch.Tensor) -> Rotation:
    frequencies, factor = rotary_frequencies(spec, spec.rotated(width), CPU)
    angles = positions[None, None, :, None].double() * frequencies
    return Rotation(angles.cos() * factor, angles.sin() * factor, spec.pairing)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_rotary_scores_depend_on_the_difference_alone(pairing):
    """q^T R(n - m) k: a constant q and k give a Toeplitz matrix, and a shift by 1000 changes nothing."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def scores(shift):
        r = rotation(c.Rotary(pairing=pairing), 8, torch.arange(64) + shift)
        return (apply_rotation(q.expand(1, 1, 64, 8), r) @ apply_rotation(k.expand(1, 1, 64, 8), r).mT)[0, 0]

    near = scores(0)
    bound = 4 * 1064 * 2**-53 * float(q.norm() * k.norm())  # the angle m*theta carries a rounding error of about m u
    for offset in (-63, -5, 0, 7):
        diagonal = near.diagonal(offset)
        assert (diagonal - diagonal[0]).abs().max() <= bound
    assert (near - scores(1000)).abs().max() <= bound


def test_rotation_turns_the_first_of_a_pair_towards_the_second():
    """Position 1 and frequency 1: (1, 0) becomes (cos 1, sin 1), in both layouts."""
    for pairing, x, expected in [
        ("halves", [1.0, 0, 0, 0], [math.cos(1), 0, math.sin(1), 0]),
        ("interleaved", [1.0, 0, 0, 0], [math.cos(1), math.sin(1), 0, 0]),
    ]:
        r = rotation(c.Rotary(pairing=pairing), 4, torch.tensor([1]))
        turned = apply_rotation(torch.tensor(x, dtype=torch.float64).view(1, 1, 1, 4), r)
        assert torch.allclose(turned.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_partial_rotation_leaves_the_rest_and_keeps_the_norm(pairing):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    turned = apply_rotation(x, rotation(c.Rotary(pairing=pairing, fraction=0.5), 8, torch.arange(5)))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-14)
    assert not torch.allclose(turned[:, :, 1:, :4], x[:, :, 1:, :4])


def test_a_longer_table_does_not_replace_a_shorter_one():
    """A captured CUDA graph reads the table that it was captured with by its address."""
    scheme = Rotary(c.Rotary(), 8)
    short = scheme.rotation(torch.arange(3)[None], torch.float32, 2)
    held = dict(scheme.tables)
    long = scheme.rotation(torch.arange(1500)[None], torch.float32, 1499)
    assert len(held) == 1
    assert all(scheme.tables[key] is table for key, table in held.items())
    assert torch.equal(long.cos[:, :, :3], short.cos)
    scheme.rotation(torch.arange(5)[None], torch.float32, 4)
    assert len(scheme.tables) == 2


def test_scalings_do_what_they_are_for():
    plain, _ = rotary_frequencies(c.Rotary(), 64, CPU)
    linear, _ = rotary_frequencies(c.Rotary(scaling=c.LinearScaling(factor=4.0)), 64, CPU)
    ntk, _ = rotary_frequencies(c.Rotary(scaling=c.NTKScaling(factor=4.0)), 64, CPU)
    yarn, factor = rotary_frequencies(c.Rotary(scaling=c.YarnScaling(factor=4.0, original_max_len=2048)), 64, CPU)
    llama, _ = rotary_frequencies(c.Rotary(scaling=c.Llama3Scaling(factor=4.0, original_max_len=2048)), 64, CPU)
    assert torch.allclose(linear * 4, plain, rtol=1e-15)
    for stretched in (ntk, yarn, llama):
        assert stretched[0] == plain[0]  # the fastest pair is kept
        assert torch.isclose(stretched[-1], plain[-1] / 4, rtol=1e-12)  # the slowest is interpolated in full
        assert ((stretched <= plain) & (stretched >= plain / 4 * (1 - 1e-12))).all()
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_sinusoids_by_hand():
    waves = sinusoids(torch.tensor([0, 3]), 4, c.Sinusoidal(base=100.0))
    assert waves[0].tolist() == [0, 1, 0, 1]
    expected = [math.sin(3), math.cos(3), math.sin(0.3), math.cos(0.3)]
    assert waves[1].tolist() == pytest.approx(expected, abs=1e-15)
    halves = sinusoids(torch.tensor([3]), 4, c.Sinusoidal(base=100.0, layout="halves"))
    assert halves[0].tolist() == pytest.approx([expected[0], expected[2], expected[1], expected[3]], abs=1e-15)


def test_sinusoids_stay_exact_at_large_positions():
    """In float32 the angle 1,000,003 would be off by 0.03; float64 keeps it to 1e-10."""
    assert float(sinusoids(torch.tensor([1_000_003]), 2, c.Sinusoidal())[0, 0]) == pytest.approx(
        math.sin(1_000_003), abs=1e-9
    )


@pytest.mark.parametrize(
    "position", [c.QueryKeyPosition(), c.QueryKeyPosition(c.Learned(offset=1))], ids=["waves", "table"]
)
def test_query_key_positions_reach_queries_and_keys_and_nothing_else(position):
    """Moved positions change q and k of the first block, not its values nor the stream that enters it."""
    model, _ = lively(variants.decoder(position=position))
    ids, here, there = tokens(2, 5), Wanting(), Wanting()
    model(ids, tap=here)
    model(ids, positions=torch.arange(5)[None] + 3, tap=there)
    for site in ("embed", "blocks.0.attention.normed", "blocks.0.attention.v"):
        assert torch.equal(here.seen[site], there.seen[site]), site
    for site in ("blocks.0.attention.q", "blocks.0.attention.k"):
        assert not torch.equal(here.seen[site], there.seen[site]), site


def test_query_key_positions_are_added_before_the_projections():
    model, _ = lively(variants.decoder(position=c.QueryKeyPosition(c.Sinusoidal(base=50.0))))
    tap, attention = Wanting(), model.blocks[1].attention
    model(tokens(2, 5), tap=tap)
    read = tap.seen["blocks.1.attention.normed"] + sinusoids(torch.arange(5), variants.D, c.Sinusoidal(base=50.0))
    q = attention.q(read).unflatten(-1, (6, variants.K)).transpose(1, 2)
    assert torch.allclose(q, tap.seen["blocks.1.attention.q"], rtol=1e-13, atol=1e-13)


def test_a_query_key_table_ends_where_a_learned_one_does():
    model, _ = lively(variants.decoder(position=c.QueryKeyPosition(c.Learned())))
    with pytest.raises(ValueError, match=f"outside a learned table of {variants.MAX_LEN}"):
        model(tokens(1, variants.MAX_LEN + 1))


def test_alibi_slopes_by_hand():
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    # 6 heads: four of the power of two, then every other slope of eight
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_t5_buckets_by_hand():
    spec = c.T5Bias(buckets=8, max_distance=16)
    offsets = torch.tensor([0, -1, -3, -4, -6, -15, -16, -1000, 5])
    # causal: four exact, then 4 + floor(4 ln(d/4) / ln 4): 4 and 5 -> 4, 6..7 -> 5, 8..11 -> 6, 12.. -> 7
    assert t5_buckets(offsets, spec, causal=True).tolist() == [0, 1, 3, 4, 5, 7, 7, 7, 0]
    # both directions: four buckets each, two exact; a key ahead starts at 4
    assert t5_buckets(torch.tensor([0, -1, 1, -2, 2, -99, 99]), spec, causal=False).tolist() == [0, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_grow_with_distance_and_fill_the_table(causal):
    spec = c.T5Bias()
    past = t5_buckets(-torch.arange(300), spec, causal)
    assert (past.diff() >= 0).all()
    everything = t5_buckets(torch.arange(-300, 300), spec, causal)
    assert int(everything.min()) == 0
    assert int(everything.max()) == spec.buckets - 1


def long_config(limit=8):
    scaling = c.LongScaling(*variants.LONG, original_max_len=limit, attention_factor=1.2)
    return variants.decoder(position=c.Rotary(scaling=scaling))


@pytest.mark.parametrize("length", [8, 9])
def test_long_scaling_equals_the_reference_on_both_sides_of_its_length(length):
    model, params = lively(long_config())
    ids = tokens(2, length)
    found = model(ids).detach()
    assert float((found - torch.from_numpy(reference.forward(model.config, params, ids))).abs().max()) < 1e-10
    never, _ = lively(long_config(limit=100))
    assert (float((found - never(ids).detach()).abs().max()) > 1e-3) is (length > 8)


def test_each_row_has_the_divisors_of_its_own_length():
    model, _ = lively(long_config())
    ids, mask = tokens(2, 10), torch.tensor([[False] * 4 + [True] * 6, [True] * 10])
    both = model(ids, mask=mask)
    torch.testing.assert_close(both[:1, 4:], model(ids[:1, 4:]), atol=1e-12, rtol=0)
    torch.testing.assert_close(both[1:], model(ids[1:]), atol=1e-12, rtol=0)


def test_a_cache_is_not_continued_across_the_length_at_which_frequencies_change():
    model, _ = lively(long_config())
    ids = tokens(1, 12)
    cache = model.new_cache()
    model(ids[:, :6], cache=cache)
    with pytest.raises(ValueError, match="compute the whole sequence anew"):
        model(ids[:, 6:], cache=cache)
    torch.testing.assert_close(model(ids[:, 6:8], cache=cache), model(ids[:, :8])[:, 6:], atol=1e-12, rtol=0)
    cache = model.new_cache()
    model(ids[:, :9], cache=cache)
    torch.testing.assert_close(model(ids[:, 9:], cache=cache), model(ids)[:, 9:], atol=1e-12, rtol=0)


def test_generation_stops_before_frequencies_change_or_recomputes():
    model, _ = lively(long_config())
    ids = tokens(1, 6).tolist()
    with pytest.raises(ValueError, match="ask for 2 new tokens or fewer, or pass cache=False"):
        generate(model, ids, max_new_tokens=3, stop=[])
    assert generate(model, ids, max_new_tokens=2, stop=[]).new == [
        generate(model, ids, 4, stop=[], cache=False).new[0][:2]
    ]
