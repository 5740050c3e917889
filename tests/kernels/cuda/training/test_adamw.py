"""AdamW's CUDA kernel is torch's AdamW: compiled for the CPU here."""

import ctypes
from pathlib import Path

import pytest
import torch

from glassformer.kernels.cuda.training import adamw, copies
from glassformer.kernels.toolchain import nvrtc
from glassformer.training import accelerate
from glassformer.training.optimizers import AdamW, Optimizer
from glassformer.training.run import Optim
from tests.emulated_cuda import built, needs_compiler
from tests.variants import decoder, lively

SHAPES = [(3,), (8,), (130, 65), (2048,), (2, 2048, 3), (1,)]


@pytest.fixture
def _emulated(monkeypatch):
    class Emulated:
        def __init__(self, text, name):
            self.library = built(text, "adamw", Path(__file__).parent, "squares")
            self.run = self.library.run if name == "adamw" else self.library.run_squares

        def launch(self, given, blocks, threads):
            assert self.library.size() == ctypes.sizeof(given)
            self.run(ctypes.byref(given), blocks, threads)

    monkeypatch.setattr(nvrtc, "kernel", lambda text, name, device: Emulated(text, name))


def groups(shapes):
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]


def optimizer(shapes=SHAPES, betas=(0.9, 0.999), **options):
    return AdamW(groups(shapes), torch.tensor(0.01), betas, **options)


def torchs(shapes=SHAPES, **options):
    return torch.optim.AdamW(groups(shapes), lr=torch.tensor(0.01), fused=True, **options)


def parameters(one):
    return [p for group in one.param_groups for p in group["params"]]


def give(one, step):
    draw = torch.Generator().manual_seed(step)
    for p in parameters(one):
        p.grad = torch.randn(p.shape, generator=draw)


def tensors(one):
    return [t for p in parameters(one) for t in (p.detach(), *one.state[p].values())]


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("options", [{}, {"betas": (0.0, 0.95), "eps": 1e-6}])
def test_steps_are_those_of_torch(options):
    plain, fast = torchs(**options), optimizer(**options)
    for step in range(4):
        for one in (plain, fast):
            give(one, step)
        plain.step()
        adamw.step(fast, torch.tensor(0.0), None)  # the first one creates the state
        for a, b in zip(tensors(plain), tensors(fast), strict=True):
            assert torch.allclose(a, b, rtol=5e-6, atol=1e-6)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_more_tensors_than_one_launch_holds():
    plain, fast = (make([(5,)] * (2 * adamw.MOST + 6)) for make in (torchs, optimizer))
    for step in range(2):
        for one in (plain, fast):
            give(one, step)
        plain.step()
        adamw.step(fast, None, None)
    for a, b in zip(tensors(plain), tensors(fast), strict=True):
        assert torch.allclose(a, b, rtol=5e-6, atol=1e-6)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_gradients_are_shrunk_and_left_as_they_are():
    plain, fast = torchs(), optimizer()
    for step in range(3):
        for one in (plain, fast):
            give(one, step)
        held = [p.grad.clone() for p in parameters(fast)]
        adamw.step(fast, None, torch.tensor(0.25))
        assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters(fast), held, strict=True))
        for p in parameters(plain):
            p.grad *= 0.25
        plain.step()
    for a, b in zip(tensors(plain), tensors(fast), strict=True):
        assert torch.allclose(a, b, rtol=5e-6, atol=1e-6)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_failed_changes_nothing(poison):
    one = optimizer()
    give(one, 0)
    one.step()
    held = [t.clone() for t in tensors(one)]
    give(one, 1)
    parameters(one)[0].grad[0] = poison
    adamw.step(one, torch.tensor(1.0), torch.tensor(poison))
    assert all(torch.equal(a, b) for a, b in zip(held, tensors(one), strict=True))


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_the_optimizer_of_a_run_uses_it(monkeypatch):
    """Captured and other steps, from the first on."""
    calls = []
    module = lively(decoder())[0].float()
    ids = torch.arange(4)[None]
    one = Optimizer(module, Optim())
    ((member, _),) = one.members
    member.on_gpu = True
    monkeypatch.setattr(accelerate, "adamw_kernel", lambda member: adamw)
    monkeypatch.setattr(adamw, "step", lambda *given: calls.append(given[1:]))
    for _ in range(3):
        module(ids).sum().backward()
        one.step(1.0)
    one.step_unless(torch.tensor(0.0), torch.tensor(0.5))
    assert calls == [(None, None)] * 3 + [(torch.tensor(0.0), torch.tensor(0.5))]


def test_what_the_kernel_does_not_take_is_left_to_torch():
    one = optimizer()
    assert not adamw.supports_call(one)  # on the CPU
    one.param_groups[0]["lr"] = 0.1
    assert not adamw.supports_call(one)


def test_gradients_and_state_of_the_wrong_layout_are_left_to_torch(monkeypatch):
    """What is on a GPU is asked of stand-ins here."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(nvrtc, "is_available", lambda: True)
    one = optimizer([(4, 6), (8,)])
    give(one, 0)
    assert adamw.supports_call(one)  # before the first step, which creates the state
    assert not one.state
    first = parameters(one)[0]
    first.grad = torch.ones(6, 4).T
    assert not adamw.supports_call(one)
    first.grad = torch.ones(4, 6)
    one.state_of(first, one.param_groups[0])
    assert adamw.supports_call(one)
    one.state[first]["exp_avg_sq"] = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert not adamw.supports_call(one)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("shapes", [[(1,)], [(3,), (130, 65), (2048,), (5, 16384 + 9)], [(7,)] * 70])
def test_norms(shapes):
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=draw) for shape in shapes]
    gradients[::2] = [t.bfloat16() for t in gradients[::2]]
    exact = float(sum(t.double().square().sum() for t in gradients) ** 0.5)
    assert abs(float(adamw.norm(gradients)) - exact) < 1e-6 * exact
    gradients[-1].flatten()[-1] = float("inf")
    assert not torch.isfinite(adamw.norm(gradients))


def test_norms_of_the_wrong_layout_are_left_to_torch(monkeypatch):
    assert not adamw.supports_norm([torch.ones(3)])  # on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(nvrtc, "is_available", lambda: True)
    assert adamw.supports_norm([torch.ones(3), torch.ones(2, 2).bfloat16()])
    assert not adamw.supports_norm([])
    for wrong in (torch.ones(3, 2).T, torch.ones(3).half(), torch.ones(9)[1:]):
        assert not adamw.supports_norm([torch.ones(3), wrong])


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_copies_and_gradients_in_bfloat16():
    plain, fast = optimizer(), optimizer()
    for p in parameters(fast)[::2]:
        assert torch.equal(copies.in_bfloat16(p), p.bfloat16())  # which asks for a copy
    for step in range(3):
        for one in (plain, fast):
            give(one, step)
        for number, (a, b) in enumerate(zip(parameters(plain), parameters(fast), strict=True)):
            if number % 3 == 0:  # in the kernel and in torch the same rounded gradient
                a.grad, b.grad, rounded = b.grad.bfloat16().float(), None, b.grad.bfloat16()
                b.grad_dtype = torch.bfloat16
                b.grad = rounded
        for one in (plain, fast):
            adamw.step(one, None, torch.tensor(0.5))
        for number, (a, b) in enumerate(zip(parameters(plain), parameters(fast), strict=True)):
            assert torch.equal(a, b)
            assert hasattr(b, copies.COPY) == (number % 2 == 0)
            assert number % 2 or torch.equal(b.bfloat16_copy, b.bfloat16())
        for p in parameters(fast):
            p.grad, p.grad_dtype = None, torch.float32
    changed = parameters(fast)[2]
    with torch.no_grad():
        changed.add_(1)
    copies.renew(parameters(fast))
    assert torch.equal(changed.bfloat16_copy, changed.bfloat16())
    copies.in_bfloat16(changed)
    assert changed.grad_dtype is torch.bfloat16
