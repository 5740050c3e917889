"""A linear layer whose products are cuBLASLt's is one of torch's: its operator has a definition that runs anywhere."""

import pytest
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.kernels.cuda.training import loss, matmuls
from glassformer.kernels.training import _replace
from glassformer.model.context import NO_TAP
from glassformer.model.layers import Dense, build_dense
from tests.variants import decoder, lively

BF = torch.bfloat16


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_what_it_says(left_transposed, right_transposed, biased):
    left, right, bias = numbers(8, 16), numbers(16, 24, seed=1), numbers(24, seed=2) if biased else None
    wanted = left @ right + (0 if bias is None else bias)
    given = (left.T.contiguous() if left_transposed else left, right.T.contiguous() if right_transposed else right)
    transposed = (left_transposed, right_transposed)
    assert torch.allclose(matmuls.matmul(*given, *transposed, bias), wanted, atol=1e-5)
    assert torch.allclose(matmuls.multiply(*given, *transposed, bias), wanted, atol=1e-5)
    narrow = [t.to(BF) for t in given]
    torch.library.opcheck(matmuls.matmul, (*narrow, *transposed, None if bias is None else bias.to(BF)))


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_and_its_gradients_are_those_of_autocast(biased):
    x, weight = numbers(4, 6, 16), numbers(24, 16, seed=1)
    bias = numbers(24, seed=2) if biased else None
    found = []
    for how in ("tuned", "plain"):
        given = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        if how == "tuned":
            y = matmuls._Linear.apply(
                given[0].flatten(0, 1).to(BF), given[1].to(BF), given[2].to(BF) if biased else None
            ).view(4, 6, 24)
        else:
            with torch.autocast("cpu", BF):
                y = F.linear(*given)
        (y.float() * numbers(4, 6, 24, seed=3)).sum().backward()
        found.append([y, *(t.grad for t in given)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()


@pytest.mark.parametrize("biased", [False, True])
def test_gelu_products_are_what_they_say(biased):
    x, weight, bias = numbers(8, 16), numbers(24, 16, seed=1), numbers(24, seed=2) if biased else None
    post, pre = matmuls.gelu_matmul(x, weight, bias)
    assert torch.allclose(pre, F.linear(x, weight, bias), atol=1e-5)
    assert torch.allclose(post, F.gelu(pre, approximate="tanh"), atol=1e-6)
    pre.requires_grad_()
    down, dy = numbers(16, 24, seed=3), numbers(8, 16, seed=4)
    (wanted,) = torch.autograd.grad(F.linear(F.gelu(pre, approximate="tanh"), down), pre, dy)
    assert torch.allclose(matmuls.gelu_backward_matmul(dy, down, pre.detach()), wanted, atol=1e-5)
    narrow = [None if t is None else t.to(BF) for t in (x, weight, bias, dy, down, pre.detach())]
    torch.library.opcheck(matmuls.gelu_matmul, tuple(narrow[:3]))
    torch.library.opcheck(matmuls.gelu_backward_matmul, tuple(narrow[3:]))


@pytest.mark.parametrize("biased", [False, True])
def test_a_feed_forward_and_its_gradients_are_those_of_autocast(biased, monkeypatch):
    spec = c.Dense(32, activation="gelu_tanh", bias=biased)
    x, found = numbers(4, 6, 16), []
    for kind in (matmuls.TunedDense, Dense):
        torch.manual_seed(0)
        layer, given = build_dense(16, spec).train(), x.clone().requires_grad_()
        layer.__class__ = kind
        monkeypatch.setattr(matmuls, "supports_call", lambda *given: True)
        with torch.autocast("cpu", BF):
            y = layer(given, NO_TAP)
        (y.float() * numbers(4, 6, 16, seed=3)).sum().backward()
        found.append({"y": y, "x": given.grad} | {name: p.grad for name, p in layer.named_parameters()})
    assert len(found[0]) == (6 if biased else 4)
    for name, wanted in found[1].items():
        assert found[0][name].dtype == wanted.dtype
        assert (found[0][name] - wanted).abs().max() <= 2**-6 * wanted.abs().max(), name


def test_a_tuned_feed_forward_that_is_looked_at_evaluated_or_elsewhere_is_dense(monkeypatch):
    layer, x = build_dense(16, c.Dense(32, activation="gelu_tanh")).train(), numbers(3, 16)
    wanted = layer(x, NO_TAP)
    layer.__class__ = matmuls.TunedDense
    assert torch.equal(layer(x, NO_TAP), wanted)  # no GPU, no autocast
    monkeypatch.setattr(matmuls, "supports_call", lambda *given: True)
    seen = {}

    class Looking:
        def wants(self, site):
            return True

        def __call__(self, site, value):
            seen[site] = value
            return value

    assert torch.equal(layer(x, Looking()), wanted)
    assert set(seen) == {"pre", "post"}
    assert torch.equal(layer.eval()(x, NO_TAP), wanted)
    assert not torch.equal(layer.train()(x, NO_TAP), wanted)  # rounded to bfloat16: the products above were its own


def test_elsewhere_a_tuned_layer_is_torchs():
    layer = torch.nn.Linear(16, 24)
    x = numbers(3, 16)
    wanted = layer(x)
    layer.__class__ = matmuls.TunedLinear
    assert torch.equal(layer(x), wanted)
    assert torch.equal(layer.eval()(x), wanted)


def install(model):
    for replacements in (matmuls.dense_replacements, matmuls.linear_replacements):
        _replace(list(replacements(model)))


def test_all_layers_of_the_blocks_are_tuned_but_experts():
    model = lively(decoder())[0]
    install(model)
    linear = [m for block in model.blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]
    assert linear
    assert {type(m) for m in linear} == {matmuls.TunedLinear}
    assert {type(block.feedforward) for block in model.blocks} == {matmuls.TunedDense}
    experts = lively(decoder(feedforward=c.MoE(n_experts=4, n_active=2, expert=c.Dense(16))))[0]
    install(experts)
    assert not any(isinstance(m, matmuls.TunedLinear) for m in experts.modules())


def test_the_matmuls_of_the_head_use_cublas_too(monkeypatch):
    """On a GPU the loss in chunks takes them from cuBLASLt; here from the operator's definition."""
    seen = []

    def spy(left, right, left_transposed=False, right_transposed=False, bias=None):
        seen.append((left_transposed, right_transposed))
        return matmuls.matmul(left, right, left_transposed, right_transposed, bias)

    monkeypatch.setattr(loss, "multiply", spy)
    hidden, weight = numbers(16, 32).to(BF), numbers(64, 32, seed=1).to(BF)
    loss.head_gradients(hidden, weight, None, torch.arange(16), (-100, 0.0, 0.0), 64)
    assert seen == [(False, True), (False, False), (True, False)]
