"""Sampling with NumPy against the filters of `sampling`, which read the whole vocabulary."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.config import ConfigError
from glassformer.generation import sampling
from glassformer.generation.sampling import (
    Sampling,
    checked,
    choose,
    distribution,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    marked,
    penalize,
)
from tests.sampled import examples

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.8, 1.0, 20.0]),
    top_k=st.none() | st.sampled_from([1, 2, 50, 700, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 1.0]),
)


def drawn_logits(seed: int, size: int, spread: float, steps: float, dtype: torch.dtype) -> torch.Tensor:
    """Return two rows with a few likely tokens, rounded to `steps`, so that there are ties, and some -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, size, generator=generator) * spread
    logits += 12 * (torch.rand(2, size, generator=generator) ** (size / 8))
    logits = (logits / steps).round() * steps
    impossible = torch.rand(2, size, generator=generator) < 0.1
    impossible[:, 0] = False
    return logits.to(dtype).masked_fill(impossible, float("-inf"))


def filtered(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The definition: every filter on all tokens."""
    logits = logits.double() / how.temperature
    if how.top_k is not None:
        logits = keep_top_k(logits, how.top_k)
    return keep_min_p(keep_top_p(logits, how.top_p), how.min_p).softmax(-1)


@settings(max_examples=examples(300))
@given(
    how=samplings, seed=st.integers(0, 10**6), size=st.sampled_from([1024, 1500, 4500, 20_011]),
    spread=st.sampled_from([0.0, 0.3, 3.0]), steps=st.sampled_from([1e-7, 0.25]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_the_same_tokens_with_the_same_probabilities(how, seed, size, spread, steps, dtype):
    logits = drawn_logits(seed, size, spread, steps, dtype)
    wanted, found = filtered(logits, how), distribution(logits, how)
    differing = ((wanted > 0) != (found > 0)).sum(-1)
    # sums of thousands of equal probabilities in two orders may reach p one token apart
    assert int(differing.max()) <= (1 if how.top_p < 1 else 0)
    if not differing.any():
        assert float((wanted - found).abs().max()) < 1e-13
    uniform = torch.rand(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ends, tokens = found.cumsum(-1), choose(logits, how, uniform)
    for row, (token, share) in enumerate(zip(tokens.tolist(), uniform.tolist(), strict=True)):
        assert found[row, token] > 0
        assert ends[row, token] - found[row, token] - 1e-9 <= share <= ends[row, token] + 1e-9


def test_rounding_draws_no_token_after_the_last():
    """Sums of parts and of their tokens round differently: in some of these rows the last draw is above all sums."""
    uniform = torch.full((300,), 1 - 2**-53, dtype=torch.float64)
    logits = torch.randn(300, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    logits[:, -300:] = float("-inf")
    assert int(choose(logits, Sampling(), uniform).max()) < 2700


def test_draws_at_both_ends_of_the_unit_interval_can_be_drawn():
    logits = drawn_logits(3, 5000, 3.0, 1e-7, torch.float32)
    logits[:, -300:] = float("-inf")
    for how in (Sampling(), Sampling(0.7), Sampling(top_k=400), Sampling(top_p=0.99), Sampling(min_p=1e-5)):
        p = distribution(logits, how)
        for share in (0.0, 2**-60, 1 - 2**-53):
            uniform = torch.full((2,), share, dtype=torch.float64)
            found = choose(logits, how, uniform)
            assert (p.gather(1, found[:, None]) > 0).all()
            assert found.tolist() == draw(p, uniform).tolist()


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("at", [0, 700, 2999])
def test_rows_with_nan_are_refused_and_no_other(changes, at):
    how = Sampling(**changes)
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    uniform = torch.full((3,), 0.5, dtype=torch.float64)
    assert min(checked(logits, choose(logits, how, uniform))) >= 0
    logits[1, at] = float("nan")
    tokens = choose(logits, how, uniform)
    assert marked(logits, tokens).tolist() == [tokens[0], -1, tokens[2]]
    with pytest.raises(ConfigError, match="not all numbers"):
        checked(logits, tokens)
    logits[1] = float("nan")
    with pytest.raises(ConfigError, match="not all numbers"):
        checked(logits, choose(logits, how, uniform))


@pytest.mark.parametrize("how", [Sampling(), Sampling(top_k=5), Sampling(0.8, 50, 0.9, 0.1), Sampling(1e-300)])
@pytest.mark.filterwarnings("error")
def test_infinite_logits_are_refused_without_a_warning_of_numpy(how):
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    if how.temperature == 1e-300:
        logits *= 1e30  # infinite when divided
    else:
        logits[0, 7] = float("inf")
    with pytest.raises(ConfigError, match="not all numbers"):
        checked(logits, choose(logits, how, torch.full((1,), 0.5, dtype=torch.float64)))
    assert distribution(logits, how).isnan().any()


def test_rows_need_not_lie_in_one_piece():
    logits = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)).T
    for how in (Sampling(), Sampling(top_k=5), Sampling(top_p=0.9)):
        assert torch.equal(distribution(logits, how), distribution(logits.contiguous(), how))


def test_a_penalty_comes_before_the_filters():
    logits = drawn_logits(5, 3000, 1.0, 1e-7, torch.float32)
    seen = torch.zeros(2, 3000, dtype=torch.bool)
    seen.scatter_(1, logits.topk(20).indices, True)
    how = Sampling(0.8, 50, 0.9, 0.01, 1.7)
    wanted = filtered(penalize(logits.double(), seen, 1.7), how)
    assert float((distribution(logits, how, seen) - wanted).abs().max()) < 1e-13
    assert torch.equal(choose(logits, how, torch.full((2,), 0.3), seen), draw(wanted, torch.full((2,), 0.3)))
    assert choose(logits, Sampling(0.0, repetition_penalty=1e9), None, seen).tolist() != logits.argmax(-1).tolist()


def test_the_lowest_of_equal_logits_is_the_most_likely_token():
    logits = torch.zeros(2, 4096)
    logits[0, [77, 300]] = 1.0
    assert choose(logits, Sampling(0.0), None).tolist() == [77, 0]
    assert np.flatnonzero(distribution(logits, Sampling(top_p=1e-9))[0].numpy()).tolist() == [77]
    assert int((distribution(logits, Sampling(top_p=0.5))[1] > 0).sum()) == 2048
    assert distribution(logits, Sampling(top_p=0.5))[1].nonzero().flatten().tolist() == list(range(2048))


def test_logits_that_need_gradients_are_filtered_by_torch():
    logits = torch.randn(1, 2000, requires_grad=True)
    distribution(logits, Sampling(top_k=3))[0].max().backward()
    assert logits.grad is not None
    assert distribution(logits.detach().bfloat16(), Sampling(top_k=3)).dtype is torch.float64


@settings(max_examples=examples(60))
@given(
    k=st.sampled_from([1, 5, 50]), p=st.sampled_from([1.0, 0.9]), min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 10**6), steps=st.sampled_from([1e-7, 0.05]),
)  # fmt: skip
def test_devices_that_numpy_cannot_read_draw_among_the_most_likely_tokens(k, p, min_p, seed, steps):
    logits = drawn_logits(seed, 4500, 3.0, steps, torch.float32)
    how = Sampling(0.8, k, p, min_p)
    wanted = filtered(logits, how)
    if int((logits >= logits.topk(k).values[:, -1:]).sum(-1).max()) > k + sampling.TIED:
        return
    uniform = torch.rand(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with mock.patch.object(sampling, "_is_readable", return_value=False):
        found = choose(logits, how, uniform)
        assert (wanted.gather(1, found[:, None]) > 0).all()
        assert found.tolist() == draw(wanted, uniform).tolist()
        logits[1, seed % 4500] = float("nan")
        assert choose(logits, how, uniform).tolist() == [found[0], 4500]
