"""Frozen matrices: rounded once with the same bits, multiplied by oneDNN within the rounding of float32."""

import copy
import gc

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.kernels import training
from glassformer.kernels.cpu.training import frozen
from glassformer.kernels.cpu.training.frozen import FrozenAdapted, FrozenLinear, frozen_replacements, keep, rounded
from glassformer.kernels.training import TrainingRequest, install_training_kernels
from glassformer.model.adapters import AdaptedLinear, attach, fresh_adapters, merged_state
from glassformer.training.chunked_loss import linear_cross_entropy
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.objective import Batch
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule
from glassformer.training.sections import Start
from glassformer.training.tuning.section import Lora

CPU = torch.device("cpu")
CONFIG = gf.presets.gpt2(n_layers=2, d_model=48, n_heads=3, max_len=16, dropout=0.0, vocab_size=4099)
TOKENS = torch.randint(0, 4099, (3, 17), generator=torch.Generator().manual_seed(0))
PRECISIONS = ["float32", "bfloat16"]


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    """A processor for which the kernel is chosen in float32, too."""
    monkeypatch.setattr(training.cxx, "is_intel", lambda: False)
    monkeypatch.setattr(training.cxx, "register_bits", lambda: 512)


def request(precision="float32", **changes):
    return TrainingRequest(CPU, getattr(torch, precision), **({"frozen": True} | changes))


def adapted(dora=False):
    model = gf.build(CONFIG, seed=1)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    attach(model, fresh_adapters(model, names, 3, 6.0, False, dora, seed=0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(2), std=0.1)
    return model.train()


def losses(folder, precision, compiled="auto", freeze=(), **lora):
    """Return the losses of three steps, and the state after them."""
    run = Run(
        model=CONFIG,
        start=Start(model=str(folder)),
        lora=Lora(**lora) if lora else None,
        optim=Optim(lr=0.01, freeze=freeze),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100, batch=3),
        machine=Machine(device="cpu", precision=precision, compile=compiled),
    )
    state = prepare_state(run)
    batch = Batch(TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous())
    return [float(train_step(state, batch)["loss"]) for _ in range(3)], state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return gf.save(gf.build(CONFIG, seed=0), tmp_path_factory.mktemp("base") / "model", format="hf")


@pytest.mark.parametrize("tuned", [{"rank": 3}, {"rank": 3, "dora": True}, {"freeze": ("q", "up")}])
def test_rounded_once_the_losses_have_the_same_bits(folder, tuned, monkeypatch):
    kept, state = losses(folder, "bfloat16", **tuned)
    assert "frozen matmuls" in state.kernels
    monkeypatch.setattr(frozen, "is_kept", lambda parameter: False)
    assert kept == losses(folder, "bfloat16", **tuned)[0]
    assert len(set(kept)) == 3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_those_of_the_engine(folder, precision):
    ours, state = losses(folder, precision, rank=3)
    plain, engine = losses(folder, precision, "no", rank=3)
    assert ("frozen matmuls" in state.kernels, engine.kernels) == (True, [])
    assert ours == pytest.approx(plain, rel=1e-5 if precision == "float32" else 1e-3)


def test_the_base_stays_as_it_was(folder):
    _, state = losses(folder, "bfloat16", rank=3)
    before, after = gf.load(folder).state_dict(), state.model.state_dict()
    assert {name for name in after if ".lora_" not in name} == set(before)
    assert all(torch.equal(after[name], before[name]) and after[name].dtype is torch.float32 for name in before)
    layer = state.model.decoder.blocks[1].feedforward.up
    assert type(layer) is FrozenAdapted
    merged = merged_state(state.model)["decoder.blocks.1.feedforward.up.weight"]
    assert torch.equal(merged, layer.adapter().merge(before["decoder.blocks.1.feedforward.up.weight"]))


def assert_same_with_and_without(model, precision, trained) -> None:
    """Compare output and gradients of a layer with the kernel and without it; in bfloat16 every bit."""
    other = copy.deepcopy(model)
    install_training_kernels(model, request(precision))
    x = torch.randn(2, 5, 48, requires_grad=True)
    found = []
    for layer in (one.decoder.blocks[0].feedforward.up for one in (model, other)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            out = layer(x)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (x, *trained(layer)))))
    assert type(model.decoder.blocks[0].feedforward.up) is not type(other.decoder.blocks[0].feedforward.up)
    for a, b in zip(*found, strict=True):
        assert a.dtype is b.dtype
        if precision == "bfloat16":
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dora", [False, True])
def test_layers_with_adapters(precision, dora):
    model = adapted(dora)
    assert_same_with_and_without(model, precision, lambda layer: (layer.lora_A, layer.lora_B))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trains_bias", [False, True])
def test_layers_without_adapters(precision, trains_bias):
    model = gf.build(CONFIG, seed=1).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or (trains_bias and name.endswith("bias")))
    assert_same_with_and_without(model, precision, lambda layer: (layer.bias,) if trains_bias else ())
    assert type(model.decoder.blocks[0].feedforward.up) is FrozenLinear


def test_a_matrix_that_changes_is_rounded_again():
    weight = nn.Parameter(torch.randn(5, 7), requires_grad=False)
    keep(weight)
    first = rounded(weight, torch.bfloat16)
    assert rounded(weight, torch.bfloat16) is first
    with torch.no_grad():
        weight.copy_(torch.randn(5, 7))  # as a resumed run does
    assert torch.equal(rounded(weight, torch.bfloat16), weight.bfloat16())
    weight.data = torch.randn(5, 7)
    assert torch.equal(rounded(weight, torch.bfloat16), weight.bfloat16())
    weight.requires_grad_(True)  # trained again: no copy is kept
    assert rounded(weight, torch.bfloat16) is not rounded(weight, torch.bfloat16)
    weight.requires_grad_(False)
    n = len(frozen._kept)
    del weight
    gc.collect()
    assert len(frozen._kept) == n - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_frozen_head(dtype, bias):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 16, generator=generator, requires_grad=True)  # two chunks of rows
    weight = nn.Parameter(torch.randn(8200, 16, generator=generator), requires_grad=False)  # two parts of outputs
    added = nn.Parameter(torch.randn(8200, generator=generator), requires_grad=False) if bias else None
    targets = torch.randint(0, 8200, (600,), generator=generator)
    targets[[3, 400]] = -100

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            total, plain = linear_cross_entropy(hidden, weight, targets, added, label_smoothing=0.1)
        return total, plain, torch.autograd.grad(total, hidden)[0]

    wanted = run()
    keep(weight)
    assert frozen.frozen_head(weight, dtype) is not None
    for a, b in zip(run(), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)


def test_which_runs_use_it(monkeypatch):
    def reason(**changes):
        given = {"device": CPU, "dtype": torch.float32, "frozen": True} | changes
        (entry,) = (kernel for kernel in training.TRAINING_KERNELS if kernel.name == "frozen matmuls")
        return entry.supports(CONFIG, TrainingRequest(**given))

    assert reason() is None
    assert reason(frozen=False) == "no parameter is frozen"
    assert reason(device=torch.device("cuda")) == "the device is cuda, not cpu"
    assert "'auto'" in reason(native=False)
    assert reason(sharded=True) == "parameters are sharded"
    monkeypatch.setattr(training.cxx, "is_intel", lambda: True)
    assert "AMD" in reason()
    assert reason(dtype=torch.bfloat16) is None


def test_quantized_matrices_are_left_alone():
    model = gf.build(CONFIG, seed=1)
    names = ["decoder.blocks.0.attention.q"]
    attach(model, fresh_adapters(model, names, 3, 6.0, False, False, seed=0), quantized=True)
    replaced = [replacement.module for replacement in frozen_replacements(model)]
    assert model.decoder.blocks[0].attention.q not in replaced
    assert model.decoder.blocks[0].attention.k in replaced
    assert isinstance(model.decoder.blocks[0].attention.q, AdaptedLinear)
