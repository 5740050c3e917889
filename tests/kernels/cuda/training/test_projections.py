"""Linear layers of one input as one matmul: against float64, and where their gradients lie in memory."""

import pytest
import torch
from torch import nn

from glassformer.kernels.cuda.training import copies, projections
from glassformer.kernels.toolchain import cublaslt
from glassformer.model.positions import Rotation, apply_rotation
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.training.emulated_between import emulate

pytestmark = needs_compiler
SIZES = [48, 32, 16]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


def layers(bias, sizes=SIZES):
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=bias) for size in sizes]


def exact(x, parts, rotation, d_outs):
    """The outputs and the gradients of x and of all parameters, in float64."""
    x = x.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for part in parts for p in part.parameters()]
    given, outs = iter(parameters), []
    for number, part in enumerate(parts):
        out = nn.functional.linear(x, next(given), next(given) if part.bias is not None else None)
        if rotation is not None and number < 2:
            out = apply_rotation(out.unflatten(2, (-1, 16)).transpose(1, 2), rotation).transpose(1, 2).flatten(2)
        outs.append(out)
    return outs, torch.autograd.grad(outs, [x, *parameters], [d.double() for d in d_outs])


def near(found, wanted):
    return float((found.double() - wanted).norm()) <= 2**-6 * float(wanted.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_projections_and_their_gradients(bias, rotated, copied, apart):
    parts, draw = layers(bias), torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 24, generator=draw).bfloat16().requires_grad_()
    angles = torch.randn(1, 1, 5, 8, generator=draw)
    rotation = Rotation(angles.cos(), angles.sin(), "halves") if rotated else None
    exact_rotation = rotation and Rotation(rotation.cos.double(), rotation.sin.double(), "halves")
    d_outs = [torch.randn(2, 5, size, generator=draw).bfloat16() for size in SIZES]
    assert projections.can_join(parts)
    for _ in range(2 if copied else 1):
        for part in parts:
            part.zero_grad()
        x.grad = None
        found = projections.project(x, *parts, heads=5, width=16, rotation=rotation)
        whole = torch.cat(d_outs, -1)  # the backward pass changes it
        torch.autograd.backward(found, d_outs if apart else whole.split(SIZES, -1))
        copies.make(p for part in parts for p in part.parameters() if copied)
    wanted, gradients = exact(x, parts, exact_rotation, d_outs)
    assert all(near(a.detach(), b.detach()) for a, b in zip(found, wanted, strict=True))
    parameters = [p for part in parts for p in part.parameters()]
    assert all(near(p.grad, g) for p, g in zip([x, *parameters], gradients, strict=True))
    if copied:
        assert all(hasattr(p, copies.COPY) for p in parameters)
        assert all(p.grad.dtype is (torch.bfloat16 if p.dim() == 2 else torch.float32) for p in parameters)


def test_what_is_one_matmul():
    """The weights of a step with copies are read in place, by one matmul, and its gradients are parts of one."""
    parts, x = layers(True), torch.randn(1, 3, 24).bfloat16()
    for _ in range(2):
        out = projections.project(x, *parts)
        copies.make(p for part in parts for p in part.parameters())
    assert {t.untyped_storage().data_ptr() for t in out} == {out[0].untyped_storage().data_ptr()}
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    assert len({part.weight.grad.untyped_storage().data_ptr() for part in parts}) == 1
    assert not projections.can_join(layers(True, [48, 20]))
    assert not projections.can_join([*layers(True, [48]), *layers(False, [48])])


def test_parts_that_are_not_next_to_each_other_are_copied():
    whole = torch.randn(2, 3, 24)
    first, second, third = whole.split(8, -1)
    assert projections.side_by_side([first, second, third]).data_ptr() == whole.data_ptr()
    assert torch.equal(projections.side_by_side([first, second, third]), whole)
    for wrong in ([second, first, third], [first, second], [first, second.clone(), third], [first, third]):
        found = projections.side_by_side(wrong)
        assert found.data_ptr() != whole.data_ptr()
        assert torch.equal(found, torch.cat(wrong, -1))


@pytest.mark.parametrize("bias", [True, False])
def test_gelu_by_the_library(bias, monkeypatch):
    """What a feed-forward asks of cuBLASLt, answered by torch, is what the kernels compute."""

    def gelu_linear(x, weight, given):
        inner = nn.functional.linear(x, weight, given)
        return nn.functional.gelu(inner.float(), approximate="tanh").bfloat16(), inner

    def gelu_backward(d_out, weight, inner):
        d_hidden = (d_out @ weight).float()
        return torch.ops.aten.gelu_backward(d_hidden, inner.float(), approximate="tanh").bfloat16()

    (up,), (down,) = layers(bias, [40]), [nn.Linear(40, 24)]
    results = []
    for by_library in (False, True):
        monkeypatch.setattr(cublaslt, "supports", lambda *matrices, answer=by_library: answer)
        monkeypatch.setattr(cublaslt, "gelu_linear", gelu_linear)
        monkeypatch.setattr(cublaslt, "gelu_backward", gelu_backward)
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        up.zero_grad(), down.zero_grad()
        out = projections.feed(x, "gelu_tanh", down, up)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), x.grad, up.weight.grad, down.weight.grad, *([up.bias.grad] if bias else [])])
    assert all(near(a, b.double()) for a, b in zip(*results, strict=True))
