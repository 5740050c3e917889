"""Ranks against closed forms, and the rank-collapse experiment against its bands, its bound and many digits."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.lens.rank import (
    ROUNDING,
    VARIANTS,
    attention_spectra,
    collapse,
    collapse_exact,
    cubic_bound,
    deviation,
    draw,
    effective_rank,
    rank_by_depth,
    singular_values,
    stable_rank,
    stream_rank,
)
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace
from tests.variants import decoder, lively, seq2seq, tokens

SEEDS = range(5)
LAYERS = (1, 2, 3, 4, 10, 25, 50)
# σ_2/σ_1 at each of LAYERS: (least, most) over five seeds. The last four columns are the bands of the claim where it
# has one (pure < 1e-12 at 10, identity > 0.1, plain skip 1e-9 to 1e-4, pre-norm + MLP > 0.03, scaled > 0.5 at 50).
ROUNDED = (0.0, 1e-12)
BANDS = {
    "attention": ((0.3, 1), (1e-3, 0.1), (1e-9, 1e-5), ROUNDED, ROUNDED, ROUNDED, ROUNDED),
    "attention-mlp": ((0.2, 1), (1e-4, 0.1), (1e-10, 1e-5), ROUNDED, ROUNDED, ROUNDED, ROUNDED),
    "identity": ((0.6, 1), (0.6, 1), (0.6, 1), (0.6, 1), (0.4, 1), (0.3, 1), (0.1, 1)),
    "skip": ((0.7, 1), (0.5, 1), (0.3, 1), (0.2, 0.8), (0.03, 0.4), (1e-4, 2e-2), (1e-9, 1e-4)),
    "pre-norm-skip": ((0.7, 1), (0.5, 1), (0.3, 1), (0.2, 0.8), (0.1, 0.4), (0.05, 0.15), (0.03, 0.1)),
    "pre-norm-skip-mlp": ((0.4, 1), (0.3, 0.8), (0.2, 0.7), (0.2, 0.6), (0.15, 0.5), (0.1, 0.4), (0.03, 0.4)),
    "scaled-skip": ((0.8, 1), (0.8, 1), (0.8, 1), (0.8, 1), (0.8, 1), (0.7, 1), (0.5, 1)),
}
fifty = functools.cache(collapse)
matrices = st.tuples(st.integers(2, 7), st.integers(2, 7), st.integers(0, 10**6)).map(
    lambda t: torch.randn(t[0], t[1], dtype=torch.float64, generator=torch.Generator().manual_seed(t[2]))
)


def test_ranks_of_matrices_with_known_spectra():
    equal = torch.full((3,), 2.0, dtype=torch.float64)
    one = torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64)
    assert effective_rank(equal).item() == pytest.approx(3)
    assert stable_rank(equal).item() == pytest.approx(3)
    assert effective_rank(one).item() == stable_rank(one).item() == 1
    assert effective_rank(0 * one).item() == stable_rank(0 * one).item() == 0
    # p = (3/4, 1/4): entropy ln 4 - (3/4) ln 3
    sigma = torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert effective_rank(sigma).item() == pytest.approx(4 / 3**0.75)
    assert stable_rank(sigma).item() == pytest.approx(10 / 9)


@given(matrices)
def test_effective_and_stable_rank_lie_between_one_and_the_rank(x):
    sigma = singular_values(x)
    for rank in (effective_rank(sigma), stable_rank(sigma)):
        assert 1 - 1e-12 <= rank.item() <= len(sigma) + 1e-9


@given(matrices, st.integers(0, 10**6))
def test_no_matrix_of_equal_rows_is_nearer_than_the_mean(x, seed):
    other = torch.randn(x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    away, mean = deviation(x) * x.norm(), x.mean(0)
    assert (x - other).norm() >= away - 1e-12
    # the identity of the proof
    assert ((x - other) ** 2).sum().item() == pytest.approx((away**2 + len(x) * ((mean - other) ** 2).sum()).item())
    assert 0 <= deviation(x).item() <= 1


def test_deviation_is_zero_for_equal_rows_and_one_without_a_mean():
    assert deviation(torch.ones(4, 3)).item() == 0
    assert deviation(torch.zeros(4, 3)).item() == 0
    assert deviation(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).item() == 1  # rank one, and yet no two rows are equal


def test_stream_ranks_are_those_of_the_traced_stream():
    model, _ = lively(decoder())
    ids = tokens(3, 11)
    found, run = rank_by_depth(model, ids), trace(model, ids)
    assert found.sites == ("embed", "blocks.0.resid_post", "blocks.1.resid_post")
    expected = torch.linalg.svdvals(run["blocks.1.resid_post"][2])
    torch.testing.assert_close(found.singular_values[2, 2], expected, atol=1e-12, rtol=0)
    x = run["embed"][1]
    assert found.deviation[0, 1].item() == pytest.approx(((x - x.mean(0)).norm() / x.norm()).item())
    assert found.effective_rank.shape == found.stable_rank.shape == (3, 3)


def test_both_stacks_of_an_encoder_decoder_have_ranks():
    model, _ = lively(seq2seq())
    run = trace(model, tokens(2, 7), target=tokens(2, 5), sites=["*embed", "*resid_post"])
    assert stream_rank(run, "encoder.").singular_values.shape == (3, 2, 7)
    assert stream_rank(run, "decoder.").singular_values.shape == (3, 2, 5)


def test_scores_not_patterns_are_bounded_by_the_head_width():
    """n = 2, K = 1, U = 2: A = [[1/2, 1/2], [1/(1+e), e/(1+e)]], whose determinant is tanh(1/2)/2."""
    q = torch.tensor([[0.0], [1.0]])
    small = attention_spectra(q, q, torch.eye(2), scale=1.0)
    assert small.pattern.prod().item() == pytest.approx(math.tanh(0.5) / 2, abs=1e-12)
    generator = torch.Generator().manual_seed(0)

    def ranks(n, k, u):
        q, key, v = (torch.randn(n, w, generator=generator, dtype=torch.float64) for w in (k, k, u))
        found = attention_spectra(q, key, v)
        values = (found.scores, found.pattern, found.log_pattern, found.output)
        return [int((sigma > 1e-12 * sigma[0]).sum()) for sigma in values]

    assert ranks(8, 1, 8) == [1, 8, 2, 8]
    assert ranks(6, 2, 3) == [2, 6, 3, 3]


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_collapse_stays_in_its_bands_at_every_layer(variant):
    for seed in SEEDS:
        run = fifty(variant, seed=seed)
        assert run.singular_values.shape == (51, 32)
        for layer, (least, most) in zip(LAYERS, BANDS[variant], strict=True):
            assert least <= run.ratio[layer].item() <= most, (variant, seed, layer)
        if variant in ("attention", "attention-mlp"):
            assert run.deviation[4:].max().item() < ROUNDING
            assert run.effective_rank[10].item() == pytest.approx(1, abs=1e-10)
        if variant == "identity":  # the spectrum spreads, the rows stay apart
            assert run.deviation.min().item() > 0.9
            assert run.ratio[50] < run.ratio[1]


def test_the_cubic_bound_holds_and_its_cube_is_what_is_seen():
    for seed in SEEDS:
        run = collapse("attention", layers=5, seed=seed)
        assert run.bound is not None
        above_rounding = run.deviation[1:] > 1e-13
        assert above_rounding.sum() == 3
        assert (run.deviation[1:] <= run.bound[1:])[above_rounding].all()
    # far in the regime of the theorem: a third of the spread, a twenty-seventh of the bound
    x, layers = draw(1, 6, 6, 0)
    bounds = [cubic_bound(x.mean(0) + s * (x - x.mean(0)), layers[0]) for s in (1e-4, 1e-4 / 3)]
    assert bounds[0] / bounds[1] == pytest.approx(27, rel=1e-6)


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 0.1, 1.0, 10.0]), st.sampled_from([(2, 2), (5, 3), (7, 11)]))
def test_the_cubic_bound_holds_for_any_input(seed, spread, shape):
    x, layers = draw(1, *shape, seed)
    x = x.mean(0) + spread * (x - x.mean(0))
    out = layers[0].attend(x)
    assert (out - out.mean(0)).norm().item() <= cubic_bound(x, layers[0]) + 1e-14


def test_many_digits_show_the_cubic_rate_and_its_bound():
    for seed in SEEDS:
        exact = collapse_exact(seed=seed)
        assert all(2.9 <= ratio <= 3.3 for ratio in exact.ratios[4:7]), exact.ratios
        assert all(value <= bound for value, bound in zip(exact.log_deviation[1:], exact.log_bound[1:], strict=True))
        assert exact.log_deviation[7] < -300  # far below what float64 can hold
        plain = collapse("attention", layers=3, n=6, d=6, seed=seed)
        torch.testing.assert_close(plain.deviation.log10().tolist(), exact.log_deviation[:4], atol=1e-5, rtol=0)


def test_digits_that_do_not_suffice_are_refused():
    with pytest.raises(LensError, match=r"layer 5 is 1e-\d+, which 40 digits cannot tell from rounding: give digits="):
        collapse_exact(digits=40)
    assert collapse_exact(seed=1, digits=400).log_deviation[7] == pytest.approx(
        collapse_exact(seed=1).log_deviation[7], abs=1e-9
    )


def test_a_plain_skip_decays_exponentially_at_half_ln_two_and_a_normed_one_as_a_root():
    rates, powers = [], []
    for seed in SEEDS:
        skip, normed = fifty("skip", seed=seed), fifty("pre-norm-skip", seed=seed)
        rates.append((skip.deviation[20] / skip.deviation[50]).log().item() / 30)
        powers.append((normed.deviation[25] / normed.deviation[50]).log2().item())
        assert skip.theory is not None
        assert normed.theory is not None
        assert 0.5 <= (skip.deviation[50] / skip.theory[50]).item() <= 10
        assert 0.8 <= (normed.deviation[50] / normed.theory[50]).item() <= 2
    mean_rate, mean_power = sum(rates) / 5, sum(powers) / 5
    assert mean_rate == pytest.approx(math.log(2) / 2, rel=0.1)
    assert mean_power == pytest.approx(0.5, abs=0.15)


def test_variants_of_one_seed_share_their_draw_and_seeds_differ():
    first = collapse("attention", layers=1, seed=3).singular_values[0]
    assert torch.equal(first, collapse("scaled-skip", layers=1, seed=3).singular_values[0])
    assert not torch.equal(first, collapse("attention", layers=1, seed=4).singular_values[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "pure"}, "variant='pure' does not exist: use attention, identity"),
        ({"variant": "skip", "layers": 0}, "layers=0 must be at least 1"),
        ({"variant": "skip", "n": 1}, "n=1 must be at least 2"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(change, message):
    with pytest.raises(LensError, match=message):
        collapse(**change)
