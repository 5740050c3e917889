"""A linear layer whose products are cuBLASLt's is one of torch's: its operator has a definition that runs anywhere."""

import pytest
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.train import fused_loss, products
from glassformer.train.fused_loss import linear_cross_entropy
from tests.variants import decoder, lively

BF = torch.bfloat16


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left_turned", [False, True])
@pytest.mark.parametrize("right_turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_what_it_says(left_turned, right_turned, biased):
    left, right, bias = numbers(8, 16), numbers(16, 24, seed=1), numbers(24, seed=2) if biased else None
    wanted = left @ right + (0 if bias is None else bias)
    given = (left.T.contiguous() if left_turned else left, right.T.contiguous() if right_turned else right)
    turned = (left_turned, right_turned)
    assert torch.allclose(products.product(*given, *turned, bias), wanted, atol=1e-5)
    assert torch.allclose(products.multiply(*given, *turned, bias), wanted, atol=1e-5)
    narrow = [t.to(BF) for t in given]
    torch.library.opcheck(products.product, (*narrow, *turned, None if bias is None else bias.to(BF)))


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_and_its_gradients_are_those_of_autocast(biased):
    x, weight = numbers(4, 6, 16), numbers(24, 16, seed=1)
    bias = numbers(24, seed=2) if biased else None
    found = []
    for how in ("tuned", "plain"):
        given = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        if how == "tuned":
            y = products._Linear.apply(
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


def test_elsewhere_a_tuned_layer_is_torchs():
    layer = torch.nn.Linear(16, 24)
    x = numbers(3, 16)
    wanted = layer(x)
    layer.__class__ = products.TunedLinear
    assert torch.equal(layer(x), wanted)
    assert torch.equal(layer.eval()(x), wanted)


def test_all_layers_of_the_blocks_are_tuned_but_experts(monkeypatch):
    monkeypatch.setattr(products, "READY", True)
    model = lively(decoder())[0]
    products.enable(model)
    linear = [m for block in model.blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]
    assert linear
    assert {type(m) for m in linear} == {products.TunedLinear}
    experts = lively(decoder(feedforward=c.MoE(n_experts=4, n_active=2, expert=c.Dense(16))))[0]
    products.enable(experts)
    assert not any(isinstance(m, products.TunedLinear) for m in experts.modules())


def test_the_heads_products_go_the_same_way(monkeypatch):
    """On a GPU the loss in chunks takes them from cuBLASLt; here from the operator's definition."""
    seen = []

    def spy(left, right, left_turned=False, right_turned=False, bias=None):
        seen.append((left_turned, right_turned))
        return products.product(left, right, left_turned, right_turned, bias)

    hidden, weight = numbers(16, 32).to(BF).requires_grad_(), numbers(64, 32, seed=1).to(BF).requires_grad_()
    targets = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets)[0], (hidden, weight))
    monkeypatch.setattr(fused_loss, "multiply", spy)
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets)[0], (hidden, weight))
    assert seen == [(False, True), (False, False), (True, False)]
    for a, b in zip(found, wanted, strict=True):
        assert (a.float() - b.float()).norm() <= 2**-6 * b.float().norm()
