"""Muon's CUDA kernels are what muon.py does with torch: compiled for the CPU here."""

import ctypes
from pathlib import Path

import pytest
import torch

from glassformer.kernels.cuda.training import muon as muon_cuda
from glassformer.kernels.toolchain import nvrtc
from glassformer.training.muon import Muon
from tests.emulated_cuda import built, needs_compiler

SHAPES = [(24, 40), (40, 24), (24, 24), (72, 65)]  # the last has a piece that is not full


@pytest.fixture
def emulated(monkeypatch):
    class Emulated:
        def __init__(self, text, name):
            self.library = built(text, name, Path(__file__).parent)

        def launch(self, given, blocks, threads):
            assert self.library.size() == ctypes.sizeof(given)
            self.library.run(ctypes.byref(given), blocks, threads)

    monkeypatch.setattr(nvrtc, "kernel", lambda text, name, device: Emulated(text, name))


def matrices(n, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(n)]


def optimizers(n, shapes=SHAPES):
    """The same matrices twice, to be stepped by torch and by the kernels."""
    return [
        Muon([p for s in shapes for p in matrices(n, s)], torch.tensor(0.3), momentum=0.9, weight_decay=0.2)
        for _ in range(2)
    ]


def give(optimizer, step):
    generator = torch.Generator().manual_seed(step)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator) * 3


def apart(plain, fast):
    a, b = (o.param_groups[0]["params"] for o in (plain, fast))
    momenta = [(plain.state[x]["momentum_buffer"], fast.state[y]["momentum_buffer"]) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).detach().abs().max()) for x, y in [*zip(a, b, strict=True), *momenta])


@pytest.mark.sample(2)
@needs_compiler
@pytest.mark.parametrize(("n", "shape"), [*((2, shape) for shape in SHAPES), (muon_cuda.MOST + 3, (8, 16))])
def test_what_is_orthogonalised_is_that_of_torch(emulated, n, shape):
    plain, fast = optimizers(n, [shape])
    for step in range(3):
        stacks = []
        for optimizer, kernels in ((plain, False), (fast, True)):
            give(optimizer, step)
            given = optimizer.param_groups[0]["params"], 0.9, muon_cuda if kernels else None
            stacks.append(optimizer._look_ahead(*given, torch.tensor(0.0), torch.tensor(2.5)).float())
        assert apart(plain, fast) < 1e-6
        assert ((stacks[0] - stacks[1]).abs() <= 2**-7 * stacks[0].abs()).all()  # the neighbour in bf16 ...
        assert (stacks[0] != stacks[1]).float().mean() < 0.01  # ... seldom


@pytest.mark.sample(2)
@needs_compiler
@pytest.mark.parametrize(("n", "shape"), [*((2, shape) for shape in SHAPES), (muon_cuda.MOST + 3, (8, 16))])
def test_matrices_move_by_the_formula(emulated, n, shape):
    given = matrices(n, shape)
    stack = torch.randn(n, *shape[::-1]).bfloat16().mT  # as a tall matrix comes back
    wanted = torch.stack(given).detach() * (1 - 0.3 * 0.2) - 0.3 * 1.5 * stack.float()
    with torch.no_grad():
        muon_cuda.move(given, stack, torch.tensor(0.3), 0.2, 1.5, None)
    assert (torch.stack(given).detach() - wanted).abs().max() < 1e-6


@needs_compiler
def test_steps_are_those_of_torch(emulated, monkeypatch):
    plain, fast = optimizers(2)
    for step in range(3):
        for optimizer, kernels in ((plain, False), (fast, True)):
            monkeypatch.setattr(muon_cuda, "supports_call", lambda matrices, rate, kernels=kernels: kernels)
            give(optimizer, step)
            optimizer.step()
    assert apart(plain, fast) < 0.02  # of steps of 0.3: where one number in bf16 is its neighbour


@needs_compiler
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_failed_changes_nothing(emulated, monkeypatch, poison):
    optimizer = optimizers(2)[0]
    monkeypatch.setattr(muon_cuda, "supports_call", lambda matrices, rate: True)
    give(optimizer, 0)
    optimizer.step()
    held = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in optimizer.param_groups[0]["params"]]
    give(optimizer, 1)
    optimizer.param_groups[0]["params"][0].grad[3, 5] = poison
    optimizer.step(torch.tensor(1.0), torch.tensor(poison))
    for p, before, momentum in zip(optimizer.param_groups[0]["params"], held, momenta, strict=True):
        assert torch.equal(p.detach(), before)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum)


def test_what_the_kernels_do_not_take_is_left_to_torch():
    rate = torch.tensor(0.1)
    assert not muon_cuda.supports_call(matrices(1, (8, 8)), rate)  # on the CPU
    assert not muon_cuda.supports_call(matrices(1, (8, 8)), 0.1)
