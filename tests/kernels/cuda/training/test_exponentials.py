"""The head's exponentials: their definition against a softmax's gradient, the CUDA kernels on a CPU against that."""

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from glassformer.kernels.cuda.training import exponentials as exp
from glassformer.kernels.cuda.training import fused_loss, hopper, tiles
from glassformer.kernels.cuda.training.fused_loss import linear_cross_entropy
from glassformer.kernels.toolchain import nvrtc
from tests.emulated_cuda import built, needs_compiler

BF = torch.bfloat16


def numbers(rows, columns, depth, dtype=BF, far=()):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, depth, generator=generator)
    weight = torch.randn(columns, depth, generator=generator) / depth**0.5
    targets = torch.randint(0, columns, (rows,), generator=generator)
    targets[1] = -100
    for r in far:  # its target is by far the lowest
        weight[targets[r]] = -weight[0]
        hidden[r] = 60 * weight[0] * depth**0.5
    return hidden.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_definition_is_cross_entropy_and_its_gradient(z_loss):
    """In float64, where the target is far off too, and columns beyond the logits count for nothing."""
    hidden, weight, targets = numbers(7, 24, 16, torch.float64, far=(3,))
    hidden.requires_grad_(), weight.requires_grad_()
    z = F.linear(hidden, weight[:20])
    targets = targets % 20
    targets[1] = -100
    plain = F.cross_entropy(z, targets, reduction="none")
    wanted = plain + z_loss * torch.where(targets == -100, 0, z.logsumexp(1).square())
    assert float(plain.detach().max()) > 89  # further off than float32 has exponentials for
    found = exp.head_gradients(hidden.detach(), weight.detach(), targets, -100, z_loss, 20)
    gradients = torch.autograd.grad(wanted.sum(), (hidden, weight))
    for a, b in zip(found, (wanted.sum(), plain.sum(), *gradients), strict=True):
        assert torch.allclose(a.double(), b.detach(), rtol=1e-5, atol=1e-6)
    torch.library.opcheck(exp.exponentials, (*(t.detach().to(BF) for t in (hidden, weight)), targets, -100, z_loss, 20))


class Matrix(ctypes.Structure):
    """What a Map holds where the copy engine is emulated."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("numbers", "rows", "columns", "step", "box")]


def emulated_map(matrix, box):
    made = nvrtc.Map()
    held = Matrix(matrix.data_ptr(), *matrix.shape, matrix.stride(0), box)
    ctypes.memmove(ctypes.byref(made), ctypes.byref(held), ctypes.sizeof(held))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@cache
def library(depth, sizes, folder):
    mine = folder / "_".join(map(str, (depth, *sizes)))
    mine.mkdir()
    text = tiles.source("exponentials.cu", depth)
    return built(text, "exponentials", mine, Path(__file__).parent, "find_offsets", "find_losses")


def run(hidden, weight, targets, z_loss, columns, folder, clusters=2):
    """The three kernels one after another, as the operator launches them."""
    N, V, depth = len(hidden), len(weight), hidden.shape[1]
    out, rows = torch.full((N, V), float("nan"), dtype=BF), torch.full((4, N), float("nan"))
    sums = torch.full((-(-V // tiles.TILE), N), float("nan"))
    maps = tiles.factors(hidden, weight) | {"out": (out, 64)}
    given = exp.Given(
        **{name: emulated_map(*of) for name, of in maps.items()},
        **exp.arguments(hidden, weight, targets, out, rows, sums),
        ignored=-100,
        z_loss=z_loss,
        columns=columns,
    )
    made = library(depth, (tiles.STAGES, tiles.CLUSTER, tiles.PANEL), folder)
    assert made.size() == ctypes.sizeof(exp.Given)
    for launch, blocks, threads in (
        (made.run_find_offsets, -(-N // 8), 256),
        (made.run, clusters * tiles.CLUSTER, tiles.THREADS),
        (made.run_find_losses, -(-N // 32), 256),
    ):
        launch(ctypes.byref(given), blocks, threads)
    return out, rows[1:]


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns", "stride", "depth", "sizes", "clusters"),
    [
        (300, 389, 392, 72, (3, 2, 2), 2),  # nothing fills its tiles; both groups take several turns
        (256, 128, 128, 200, (2, 1, 8), 1),  # a tile for each group, of twice as many steps as the ring holds
        pytest.param(513, 700, 704, 320, (5, 2, 3), 1, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_are_the_definition(rows, columns, stride, depth, sizes, clusters, small, folder):
    small(*sizes)
    hidden, weight, targets = numbers(rows, stride, depth, far=(5,))
    targets = torch.where(targets == -100, targets, targets % columns)
    e, found = run(hidden, weight, targets, 1e-2, columns, folder, clusters)
    wanted_e, wanted = exp.exponentials(hidden, weight, targets, -100, 1e-2, columns)
    # float32 sums in another order, and 2^x of a product by log2 e: its rounding grows with the exponent
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    gradient, wanted_gradient = e * found[2, :, None], wanted_e * wanted[2, :, None]
    assert torch.allclose(gradient, wanted_gradient, rtol=2**-6, atol=1e-6)
    assert not e[1].any()
    assert not e[:, columns:].any()


@needs_compiler
@pytest.mark.parametrize("lazy", [0, 5, 10])
def test_warps_need_not_keep_step(lazy, small, folder, monkeypatch):
    monkeypatch.setenv("EMULATED_ORDER", str(lazy))
    small(3, 2, 2)
    hidden, weight, targets = numbers(300, 392, 72)
    e, found = run(hidden, weight, targets, 0.0, 392, folder, 1)
    wanted_e, wanted = exp.exponentials(hidden, weight, targets, -100, 0.0, 392)
    assert torch.allclose(e * found[2, :, None], wanted_e * wanted[2, :, None], rtol=2**-6, atol=1e-6)


@needs_compiler
def test_what_is_no_number_stays_none(small, folder):
    small(2, 1, 8)
    hidden, weight, targets = numbers(128, 128, 200)
    hidden[7, 3], hidden[9, 0] = float("nan"), float("inf")
    _, found = run(hidden, weight, targets, 0.0, 128, folder, 1)
    assert (~found[1].isfinite()).nonzero()[:, 0].tolist() == [7, 9]


def test_the_loss_goes_this_way_where_it_can(monkeypatch):
    """Here by the definition: losses and gradients of the plain chunks, of which logits in bfloat16 are rounded."""
    hidden, weight, targets = numbers(64, 96, 32)
    seen = []

    def suits(h, w, smoothing):
        seen.append(smoothing)
        return smoothing == 0

    for options in ({}, {"z_loss": 1e-3}, {"label_smoothing": 0.1}):
        found = []
        for patched in (False, True):
            monkeypatch.setattr(exp, "suits", suits if patched else lambda *given: False)
            given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            total, plain = linear_cross_entropy(*given, targets, **options)
            found.append((total, plain, *torch.autograd.grad(total, given)))
        for a, b in zip(*found, strict=True):
            assert (a.float() - b.float()).norm() <= 2**-6 * b.float().norm()
    assert seen == [0, 0, 0.1]
    bias = torch.zeros(96, dtype=BF, requires_grad=True)
    assert torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, bias)[0], bias)[0].any()  # as before
    assert fused_loss.exponentials is exp


class OnGpu:
    """As much of a matrix on a GPU as is asked about."""

    is_cuda, dtype = True, BF

    def __init__(self, *shape):
        self.shape = shape

    def __len__(self):
        return self.shape[0]


def test_only_hopper_and_what_the_copy_engine_takes_suit(monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda: True)
    assert exp.suits(OnGpu(8, 768), OnGpu(50304, 768), 0.0)
    assert not exp.suits(OnGpu(8, 768), OnGpu(50304, 768), 0.1)
    assert not exp.suits(OnGpu(8, 764), OnGpu(50304, 764), 0.0)
    assert not exp.suits(OnGpu(8, 768), OnGpu(65, 768), 0.0)
    assert not exp.suits(torch.zeros(8, 768, dtype=BF), torch.zeros(4096, 768, dtype=BF), 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_a_gpu_they_are_the_definition():
    from glassformer.bench.gpu.cuda_kernels import exponentials_equal_their_definition

    assert all(finding.passed for finding in exponentials_equal_their_definition())
