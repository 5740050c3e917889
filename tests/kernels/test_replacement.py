"""A replaced module keeps its parameters and their names; queries, keys and values by one matmul are those by three."""

import pytest
import torch
from torch import nn

from glassformer import config as c
from glassformer.kernels.replacement import JoinedAttention, Replacement, joined_replacements
from glassformer.kernels.training import _replace
from glassformer.model.attention import Attention
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss
from tests.variants import decoder, lively


class Doubled(nn.Linear):
    factor: float = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


def test_a_module_gets_the_class_and_the_attributes():
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    wanted, names, parameters = layer(x), list(layer.state_dict()), list(layer.parameters())
    assert _replace([Replacement(layer, Doubled, {"factor": 2.0})])
    assert torch.equal(layer(x), 2 * wanted)
    assert list(layer.state_dict()) == names
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert not _replace([])


SHARED = c.Attention(n_heads=6, n_kv_heads=2, d_head=10, d_value=7, bias=False)
CASES = {
    "biases": {"attention": c.Attention(n_heads=2)},
    "shared heads of other widths": {"attention": SHARED},
    "rotary, normed": {"attention": c.Attention(n_heads=2, d_head=4, qk_norm=c.RMSNorm()), "position": c.Rotary()},
    "query/key positions": {"attention": c.Attention(n_heads=2), "position": c.QueryKeyPosition()},
}


def join(model):
    assert _replace(list(joined_replacements(model)))
    assert any(type(module) is JoinedAttention for module in model.modules())


@pytest.fixture(params=CASES)
def model(request):
    return lively(decoder(**CASES[request.param]))[0].double()


def gradients(model):
    ids = torch.randint(0, model.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    total, _ = summed_loss(model.train(), Batch(ids[:, :-1], ids[:, 1:]), Loss(), True)
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in model.parameters())]


def test_a_step_with_joined_projections_is_the_same(model, monkeypatch):
    wanted, names = gradients(model), list(model.state_dict())
    join(model)
    if not isinstance(model.config.position, c.QueryKeyPosition):  # values read something else there
        monkeypatch.delattr(Attention, "project_kv")
    for a, b in zip(wanted, gradients(model), strict=True):
        assert (a - b).abs().max() <= 1e-10 * (1 + a.abs().max())  # a bias of keys has no gradient
    assert list(model.state_dict()) == names


def test_evaluated_joined_attention_is_an_attention(model):
    ids = torch.randint(0, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = model.eval()(ids)
    join(model)
    assert torch.equal(model.eval()(ids), wanted)
