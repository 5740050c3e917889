"""Samplers: exact distributions against the oracle and transformers, draws against the distributions."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.generation.sampling import Sampling, choose, distribution, draw, keep_top_k, keep_top_p
from glassformer.reference.sampling import distribution as oracle_distribution
from tests.sampled import examples

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


@settings(max_examples=examples(200))
@given(sampling=samplings, seed=st.integers(0, 999))
def test_distribution_equals_oracle(sampling, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 11, generator=generator, dtype=torch.float64) * 2
    seen = torch.rand(2, 11, generator=generator) < 0.3
    ours = distribution(logits, sampling, seen)
    for row in range(2):
        theirs = oracle_distribution(
            logits[row].numpy(),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            context=seen[row].nonzero().flatten().tolist(),
        )
        assert (ours[row] - torch.from_numpy(theirs)).abs().max() < 1e-14


def test_filters_equal_those_of_transformers():
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(3, 50, generator=generator, dtype=torch.float64) * 3
        context = torch.randint(0, 50, (3, 6), generator=generator)
        seen = torch.zeros(3, 50, dtype=torch.bool).scatter(1, context, True)
        theirs = logits.clone()
        for warp in (
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ):
            theirs = warp(context, theirs)
        ours = distribution(logits, Sampling(0.8, 20, 0.9, 0.05, 1.2), seen)
        assert (ours - theirs.softmax(-1)).abs().max() < 1e-14


@settings(max_examples=examples(60))
@given(weights=st.lists(st.integers(1, 30), min_size=2, max_size=7, unique=True), p=st.fractions(Fraction(1, 50), 1))
def test_nucleus_is_the_smallest_set_that_reaches_p(weights, p):
    """By enumeration of all subsets, in exact rationals; p is kept off the ties where float and rational may part."""
    exact = [Fraction(w, sum(weights)) for w in weights]
    sums = sorted(itertools.accumulate(sorted(exact, reverse=True)))
    if any(abs(p - s) < Fraction(1, 10**9) for s in sums):
        return
    kept = torch.isfinite(keep_top_p(torch.tensor([weights], dtype=torch.float64).log(), float(p)))[0]
    ids = range(len(weights))
    smallest = min(
        (
            s
            for n in range(1, len(weights) + 1)
            for s in itertools.combinations(ids, n)
            if sum(exact[i] for i in s) >= p
        ),
        key=lambda s: (len(s), -sum(exact[i] for i in s)),
    )
    assert {i for i in ids if kept[i]} == set(smallest)


def test_nucleus_keeps_at_least_one_and_orders_ties_by_id():
    logits = torch.zeros(1, 5)
    assert torch.isfinite(keep_top_p(logits, 1e-9))[0].tolist() == [True, False, False, False, False]
    assert torch.isfinite(keep_top_p(logits, 0.4))[0].tolist() == [True, True, False, False, False]


def test_top_k_of_zero_is_off():
    assert Sampling(top_k=0) == Sampling(top_k=None) == Sampling()
    logits = torch.tensor([[0.3, -1.0, 2.0]])
    assert torch.equal(distribution(logits, Sampling(top_k=0)), distribution(logits, Sampling()))


def test_top_k_keeps_ties_and_may_exceed_the_vocabulary():
    assert torch.isfinite(keep_top_k(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 1))[0].tolist() == [False, True, True, False]
    assert torch.isfinite(keep_top_k(torch.zeros(1, 3), 99)).all()


def test_temperature_zero_is_argmax_lowest_id_first():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]])
    assert distribution(logits, Sampling(temperature=0.0)).argmax(-1).tolist() == [1, 0]
    assert choose(logits, Sampling(temperature=0.0), torch.zeros(2)).tolist() == [1, 0]


def test_draw_inverts_the_distribution():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75]], dtype=torch.float64)
    for uniform, token in [(0.0, 1), (0.2499999, 1), (0.25, 3), (0.9999999999999999, 3)]:
        assert draw(p, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_draw_never_picks_a_removed_token():
    """Even when rounding leaves the running total short of one, and at both ends of the unit interval."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    p = distribution(logits, Sampling(top_k=7))
    for uniform in (0.0, 1 - 2**-53, *torch.rand(200, generator=torch.Generator().manual_seed(1)).tolist()):
        assert p[0, draw(p, torch.tensor([uniform], dtype=torch.float64)).item()] > 0


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=3), Sampling(top_p=0.8), Sampling(min_p=0.2)]
)
def test_frequencies_follow_the_distribution(sampling):
    """20,000 draws; each frequency within sqrt(ln(2·8/1e-6) / (2·20000)) = 0.0204 (Hoeffding, union over 8 ids)."""
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    p = distribution(logits, sampling)
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tokens = draw(p.expand(20_000, 8), uniform)
    frequency = torch.bincount(tokens, minlength=8) / 20_000
    assert (frequency - p[0]).abs().max() < 0.0204
    assert (frequency[p[0] == 0] == 0).all()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, "temperature=-0.1 must be 0"),
        ("temperature", float("nan"), "temperature=nan"),
        ("temperature", float("inf"), "temperature=inf"),
        ("top_k", -3, "top_k=-3 must be a whole number of at least 1, or 0 to keep all tokens"),
        ("top_k", True, "top_k=True"),
        ("top_p", 0.0, r"top_p=0.0 must be in \(0, 1\]"),
        ("top_p", 1.1, r"top_p=1.1 must be in \(0, 1\]"),
        ("min_p", -0.5, "min_p=-0.5"),
        ("min_p", 1.5, "min_p=1.5"),
        ("repetition_penalty", 0.0, "repetition_penalty=0.0 must be positive"),
    ],
)
def test_bad_settings_are_refused_in_words(field, value, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**{field: value})
