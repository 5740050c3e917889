"""Norms, activations, rotations and sums of a training step, compiled for the CPU, against float64."""

import pytest
import torch

from glassformer.kernels.cuda.training import between
from glassformer.model.layers import ACTIVATIONS
from glassformer.model.positions import Rotation, apply_rotation
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.training.emulated_between import emulate

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


def exact_norm(x, weight, bias, norm):
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if weight is None else x * (weight.double() + norm.offset)
    return x if bias is None else x + bias.double()


def near(found, wanted, bound=2**-7):
    return float((found.double() - wanted).norm()) <= bound * float(wanted.norm()) + 1e-6


@pytest.mark.sample(5)  # most cases compile kernels of their own
@pytest.mark.parametrize("width", [8, 64, 256, 264, 1032])
@pytest.mark.parametrize(
    ("centred", "wide", "added"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_norms_and_their_gradients(width, centred, wide, added):
    draw = torch.Generator().manual_seed(width)
    rows = 37  # no multiple of the rows of a block
    stream = torch.randn(rows, width, generator=draw) + 3
    stream = stream if wide else stream.bfloat16()
    branch = torch.randn(rows, width, generator=draw).bfloat16() if added else None
    more = torch.randn(width, generator=draw) if added and width != 264 else None
    weight, bias = torch.randn(width, generator=draw), torch.randn(width, generator=draw) if centred else None
    norm = between.Norm(centred, 1e-5, 0.5)
    d_out, d_sum = torch.randn(2, rows, width, generator=draw).bfloat16()
    total, out, statistics = between.norm_forward(stream, branch, more, weight, bias, norm)
    wanted = stream.double() + (branch.double() if added else 0) + (0 if more is None else more.double())
    assert near(total, wanted, 2**-7 if not wide else 1e-6)
    x = total.double().requires_grad_()
    w = weight.double().requires_grad_()
    b = None if bias is None else bias.double().requires_grad_()
    y = exact_norm(x, w, b, norm)
    assert near(out, y.detach())
    (y * d_out.double()).sum().backward()
    given = d_sum.to(stream.dtype)
    d_stream, d_branch, d_norm = between.norm_backward(
        d_out, given, total, statistics, weight, norm, added, more is not None
    )
    assert near(d_stream, x.grad + d_sum.double(), 2**-7 if not wide else 1e-5)
    assert d_branch.dtype is torch.bfloat16 or not added
    assert near(d_branch, x.grad + d_sum.double())
    assert near(d_norm[0], w.grad, 1e-4)
    assert b is None or near(d_norm[1], b.grad, 1e-4)
    assert more is None or near(d_norm[2], (x.grad + d_sum.double()).sum(0), 1e-4)
    alone, *_ = between.norm_backward(d_out, None, total, statistics, weight, norm, added, False)
    assert near(alone, x.grad, 2**-7 if not wide else 1e-4)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", between.ACTIVATION_NAMES)
@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_their_gradients(kind, gated):
    draw = torch.Generator().manual_seed(0)
    inner = (4 * torch.randn(3, 5, 24 * (1 + gated), generator=draw)).bfloat16()
    d_out = (4 * torch.randn(3, 5, 24, generator=draw)).bfloat16()
    gate, up = inner[..., :24], inner[..., 24:] if gated else None
    exact = inner.double().requires_grad_()
    wanted = ACTIVATIONS[kind](exact[..., :24]) * (exact[..., 24:] if gated else 1)
    wanted.backward(d_out.double())
    assert near(between.activation_forward(gate, up, kind), wanted.detach())
    for summed in (False, True):
        found, sums = between.activation_backward(d_out, gate, up, kind, summed)
        assert near(found, exact.grad)
        assert not summed or near(torch.cat(sums), exact.grad.sum((0, 1)), 1e-3)
        assert len(sums) == summed * (1 + gated)


@pytest.mark.parametrize("shapes", [[(37, 24)], [(5, 2056)] * 3, [(9, 16), (9, 24)], [(9, 12)]])
def test_column_sums(shapes):
    draw = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
    found = between.column_sums(matrices)
    assert all(near(a, m.double().sum(0), 1e-5) for a, m in zip(found, matrices, strict=True))


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize(("width", "rotated", "own"), [(64, 64, False), (24, 16, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_rotations(pairing, width, rotated, own, dtype, in_place):
    """The first three of five heads of a token."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 5 * width, generator=draw).bfloat16()
    angles = torch.randn(2 if own else 1, 5, rotated // 2, generator=draw)
    waves = angles.cos().to(dtype), angles.sin().to(dtype)
    rotation = Rotation(*(wave[:, None].double() for wave in waves), pairing)
    heads = x.double().unflatten(2, (5, width))
    wanted = torch.cat([apply_rotation(heads[:, :, :3].transpose(1, 2), rotation).transpose(1, 2), heads[:, :, 3:]], 2)
    given, found = x.clone(), x.clone()
    between.rotate(found if in_place else given, found, 3, width, waves, pairing == "halves", 1.0)
    assert torch.equal(given, x)
    assert near(found, wanted.flatten(2))
    assert torch.equal(found[..., 3 * width :], x[..., 3 * width :])
    between.rotate(found, found, 3, width, waves, pairing == "halves", -1.0)
    assert near(found, x.double(), 2**-6)


WIDTHS = [(8, True), (256, True), (24, False), (260, False), (264, True), (8200, False)]


@pytest.mark.parametrize(("width", "supported"), WIDTHS)
def test_widths_of_norms(width, supported):
    assert (between.unsupported_width(width) is None) == supported
