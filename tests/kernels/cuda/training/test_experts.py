"""All experts in one grouped matmul: the engine's outputs, gradients and losses, on a CPU in float32 and bfloat16."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.kernels.cuda.training import experts
from glassformer.kernels.replacement import replace_modules
from glassformer.model.context import NO_TAP
from glassformer.model.moe import MoE
from glassformer.training.objective import Batch, has_experts, summed_loss
from glassformer.training.run import Loss
from tests.variants import lively

PARTS = [
    c.Dense(16),
    c.Dense(24, "relu2", bias=False),
    c.Gated(16),
    c.Gated(16, "gelu_tanh", bias=True, limit=0.5, up_offset=1.0),
    c.Gated(16, down_bias=True),
]


def pair(spec, seed=0, dtype=torch.float32):
    """The engine's mixture of experts and ours with the same weights."""
    torch.manual_seed(seed)
    plain = MoE(8, spec).to(dtype)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    grouped = copy.deepcopy(plain)
    grouped.__class__ = experts.GroupedMoE
    return plain, grouped


def results(module, x):
    x = x.clone().requires_grad_()
    out = module(x, NO_TAP)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in module.parameters())]


@given(
    part=st.sampled_from(PARTS),
    n_experts=st.integers(2, 5),
    n_active=st.integers(1, 2),
    tokens=st.integers(1, 9),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_those_of_the_engine(part, n_experts, n_active, tokens, shared, seed):
    spec = c.MoE(n_experts, n_active, part, shared=c.Dense(8) if shared else None)
    plain, grouped = pair(spec, seed)
    x = torch.randn(2, tokens, 8)
    for wanted, found in zip(results(plain, x), results(grouped, x), strict=True):
        if wanted is None:  # an expert without tokens: the engine does not call it, and its gradient is zero
            assert found is not None
            assert not found.any()
        else:
            assert torch.allclose(wanted, found, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_under_autocast():
    plain, grouped = pair(c.MoE(4, 2, c.Gated(16)))
    x = torch.randn(3, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = results(plain, x), results(grouped, x)
    for a, b in zip(wanted, found, strict=True):
        assert (a - b).abs().max() < 2**-5 * a.abs().max()


def test_evaluation_uses_the_engine(monkeypatch):
    plain, grouped = pair(c.MoE(4, 2, c.Gated(16)))
    monkeypatch.setattr(experts.GroupedMoE, "compute", None)
    x = torch.randn(3, 8)
    assert torch.equal(plain.eval()(x, NO_TAP), grouped.eval()(x, NO_TAP))


def test_a_model_learns_the_same():
    """The loss with the balance of the routers, of a model whose first layer has no experts."""
    config = c.DecoderConfig(
        vocab_size=32, d_model=16, n_layers=2, attention=c.Attention(2), feedforward=c.MoE(4, 2, c.Gated(16)),
        position=c.Rotary(), max_len=16, norm=c.RMSNorm(), head=c.Head(),
        layer_kinds=(c.LayerKind((0,), feedforward=c.Gated(32)),),
    )  # fmt: skip
    plain = lively(config, seed=3)[0].float().train()
    grouped = copy.deepcopy(plain)
    assert replace_modules(experts.replacements(grouped))
    assert has_experts(grouped)
    ids = torch.randint(0, 32, (2, 13), generator=torch.Generator().manual_seed(1))
    batch, losses = Batch(ids[:, :-1], ids[:, 1:]), []
    for model in (plain, grouped):
        total, _ = summed_loss(model, batch, Loss(balance=0.1), True)
        total.backward()
        losses.append(float(total.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (name, a), (_, b) in zip(plain.named_parameters(), grouped.named_parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5), name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own compiler
def test_one_graph_without_questions_to_the_device():
    """torch.compile sees no operation whose sizes depend on the routing."""
    _, grouped = pair(c.MoE(4, 2, c.Gated(16)))
    with torch.autocast("cpu", torch.bfloat16):
        explained = torch._dynamo.explain(lambda x: grouped(x, NO_TAP))(torch.randn(6, 8))
    assert explained.graph_break_count == 0


@pytest.mark.parametrize(("kind", "reason"), [("cpu", "not cuda"), ("cuda", "9.0")])
def test_devices_without_it(kind, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert reason in experts.unsupported_device(torch.device(kind))
