"""The kernels against the definition in float64, forward and backward; errors within what torch's own kernels make."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.kernels.cpu.training.functions import attention, feed_forward
from glassformer.kernels.toolchain import cxx
from tests.sampled import examples

pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outcome(function, inputs, d_out, dtype):
    """The result and the gradients of the inputs, all in float64."""
    held = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in inputs]
    out = function(*held)
    out.backward(d_out.to(dtype))
    return [out.detach().double(), *(x.grad.double() for x in held if x is not None)]


def assert_close(found, exact, dtype, terms):
    """Sums of `terms` products in float32: roundings add up like their root.

    bfloat16 rounds the results once more, and once the pattern and the gradient of the scores, whose sums they are.
    """
    roundings = 8 + 2 * terms**0.5 if dtype is torch.float32 else 2
    for ours, true in zip(found, exact, strict=True):
        bound = EPSILON[dtype] * roundings * max(4.0, float(true.abs().max()))  # what cancels was about this large
        assert float((ours - true).abs().max()) < bound


def heads(x, n):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.integers(1, 3), shared=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), queries=st.integers(1, 120),
    keys=st.integers(1, 120), width=st.sampled_from([16, 32, 48]), value=st.sampled_from([16, 32, 80]),
    causal=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_is_the_definition_and_so_are_its_gradients(
    batch, shared, queries, keys, width, value, causal, dtype, seed
):
    H, G = shared
    keys = queries if causal else keys
    q, k = draw(seed, batch, queries, H * width), draw(seed + 1, batch, keys, G * width)
    v, d_out = draw(seed + 2, batch, keys, G * value), draw(seed + 3, batch, queries, H * value)
    inputs = [x.to(dtype) for x in (q, k, v)]
    d_out = d_out.to(dtype)

    def ours(q, k, v):
        return attention(heads(q, H), heads(k, G), heads(v, G), 0.2, causal).transpose(1, 2).flatten(2)

    def torchs(q, k, v):
        q, k, v = heads(q, H), heads(k, G), heads(v, G)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    exact = outcome(torchs, inputs, d_out, torch.float64)
    assert_close(outcome(ours, inputs, d_out, dtype), exact, dtype, max(queries, keys) + width + value)


@pytest.mark.parametrize("queries", [1, 7, 50])
def test_bfloat16_is_added_up_in_float32(queries):
    """Equal scores make the pattern 1/256: every product is exact, and so must be their sums, of odd queries too."""
    keys = 256
    q, k = torch.zeros(1, 1, queries, 16), draw(0, 1, 1, keys, 16)
    v, d_out = draw(1, 1, 1, keys, 32).mul(60).round(), draw(2, 1, 1, queries, 32).mul(60).round()
    out, d_q, d_k, d_v = outcome(lambda *x: attention(*x, 0.25, False), (q, k, v), d_out, torch.bfloat16)
    assert torch.equal(out, v.double().mean(2, keepdim=True).bfloat16().double().expand_as(out))
    assert torch.equal(d_v, (d_out.double().sum(2, keepdim=True) / keys).bfloat16().double().expand_as(d_v))
    assert not d_k.any()
    assert d_q.any()


def test_attention_of_tensors_that_lie_otherwise():
    q, k, v = (draw(i, 2, 16, 3, 20).transpose(1, 3).requires_grad_() for i in range(3))  # the last step is not 1
    out = attention(q, k, v, 0.25, True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    torch.testing.assert_close(out, expected)
    for found, true in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)


def test_a_query_that_is_sure_of_its_key_moves_nothing():
    """Its pattern is constant, so its gradient is zero: what rounding leaves of it, AdamW would enlarge."""
    q, k, v = (draw(seed, 3, 2, 40, 32).requires_grad_() for seed in range(3))
    out = attention(q, k, v, 0.2, True)
    out.backward(draw(3, *out.shape))
    assert float(q.grad[:, :, 0].abs().max()) < 1e-12
    assert float(q.grad[:, :, 1:].abs().max()) > 0.1


def test_attention_of_large_scores_and_of_nan_and_infinity():
    q, k, v = (draw(i, 1, 1, 40, 16) * 60 for i in range(3))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=1.0)
    torch.testing.assert_close(attention(q, k, v, 1.0, True).double(), expected, rtol=1e-3, atol=1e-2)
    q[0, 0, 7] = float("nan")
    out = attention(q, k, v, 1.0, True)
    assert out[0, 0, 7].isnan().all()
    assert out[0, 0, :7].isfinite().all()
    assert out[0, 0, 8:].isfinite().all()


@settings(max_examples=examples(30), deadline=None)
@given(
    n=st.integers(1, 420), width=st.sampled_from([16, 32, 48, 128, 400]),
    hidden=st.sampled_from([32, 64, 160, 512, 544]), tanh=st.booleans(), biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_feed_forward_is_the_definition_and_so_are_its_gradients(n, width, hidden, tanh, biased, seed):
    x, d_out = draw(seed, n, width) * 2, draw(seed + 1, n, width)
    up, down = draw(seed + 2, hidden, width) * width**-0.5, draw(seed + 3, width, hidden) * hidden**-0.5
    up_bias, down_bias = (draw(seed + 4, hidden), draw(seed + 5, width)) if biased else (None, None)
    inputs = (x, up, up_bias, down, down_bias)

    def plain(x, up, up_bias, down, down_bias):
        return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh" if tanh else "none"), down, down_bias)

    def ours(x, up, up_bias, down, down_bias):
        return feed_forward(x, up, up_bias, down, down_bias, tanh)

    exact = outcome(plain, inputs, d_out, torch.float64)
    assert_close(outcome(ours, inputs, d_out, torch.float32), exact, torch.float32, n + hidden + width)


@pytest.mark.parametrize("tanh", [False, True])
def test_the_gelu_of_every_size_of_number(tanh):
    """Through identity matrices the feed-forward is the GELU itself: exact to a rounding from -30 to 30."""
    x = torch.linspace(-30, 30, 32_000).view(1000, 32).requires_grad_()
    one = torch.eye(32)
    out = feed_forward(x, one, None, one, None, tanh)
    (slope,) = torch.autograd.grad(out.sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh" if tanh else "none")
    (true,) = torch.autograd.grad(expected.sum(), exact)
    # 1.3e-8 is the fit; x times a rounded Phi and the sum of both terms of the slope round a few times
    off = (out - expected).detach().abs() / exact.detach().abs().clamp(min=1)
    assert float(off.max()) < 2.0**-22
    assert float((slope - true).abs().max()) < 2.0**-18


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_every_time_with_any_number_of_threads(threads):
    held = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        x, up, down = draw(0, 500, 32), draw(1, 96, 32), draw(2, 32, 96)
        q = draw(3, 2, 2, 70, 16)
        runs = [
            outcome(lambda *a: feed_forward(a[0], a[1], None, a[2], None, False), (x, up, down), x, torch.float32)
            + outcome(lambda q: attention(q, q, q, 0.3, True), (q,), q, torch.float32)
            + outcome(lambda q: attention(q, q, q, 0.3, True), (q,), q, torch.bfloat16)
            for _ in range(2)
        ]
    finally:
        torch.set_num_threads(held)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_a_second_derivative_is_refused():
    x = draw(0, 4, 16).requires_grad_()
    up, down = draw(1, 32, 16), draw(2, 16, 32)
    (slope,) = torch.autograd.grad(feed_forward(x, up, None, down, None, False).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
