"""A model that trains in the kernels is the model: loss, gradients, names; and where it must not, it does not."""

import copy

import pytest
import torch

import glassformer as gf
from glassformer.kernels import training as kernels
from glassformer.kernels.cpu.training import modules
from glassformer.kernels.toolchain import cxx
from glassformer.kernels.training import TrainingRequest, install_training_kernels
from glassformer.model import build
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss, Machine, Run, Schedule
from tests.variants import lively

needs_compiler = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
NANO = gf.presets.nano(n_layers=2, d_model=32, n_heads=2, d_ff=64, max_len=24)
CONFIGS = {
    "nano": NANO,
    "gpt2": gf.presets.gpt2(n_layers=2, d_model=48, n_heads=3, d_ff=96, max_len=24, vocab_size=65, dropout=0.0),
    "grouped": gf.presets.llama_tiny(n_layers=2, d_model=64, n_heads=4, max_len=24, vocab_size=65),
    "t5": gf.presets.t5_small(
        n_layers=2, n_encoder_layers=2, d_model=32, n_heads=2, d_head=16, d_ff=64, vocab_size=65, dropout=0.0
    ),
    "original": gf.presets.transformer_base(
        n_layers=2, n_encoder_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=65, dropout=0.0
    ),
}


CPU = TrainingRequest(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _processor(monkeypatch):
    """A processor on which all kernels are used."""
    monkeypatch.setattr(cxx, "register_bits", lambda: 512)
    monkeypatch.setattr(cxx, "is_intel", lambda: False)


def batch(config, rows=3, length=20):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 65, (rows, length + 1), generator=draw)
    source = torch.randint(0, 65, (rows, 13), generator=draw) if isinstance(config, gf.Seq2SeqConfig) else None
    return Batch(ids[:, :-1], ids[:, 1:], source)


def gradients(model, config):
    total, plain = summed_loss(model, batch(config), Loss(), True)
    total.backward()
    return float(plain.detach()), {name: p.grad for name, p in model.named_parameters()}


@needs_compiler
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("intel", [False, True])
def test_loss_and_gradients_are_the_engines(name, intel, monkeypatch):
    monkeypatch.setattr(cxx, "is_intel", lambda: intel)  # there, attention alone
    config = CONFIGS[name]
    plain = lively(config, seed=3)[0].float().train()
    quick = copy.deepcopy(plain)
    names = install_training_kernels(quick, CPU)
    feeds = ["native feed-forward"] if name in ("nano", "gpt2") and not intel else []
    assert names == ["native attention", *feeds]
    assert any(isinstance(m, modules.NativeAttention) for m in quick.modules())
    (loss, expected), (found_loss, found) = gradients(plain, config), gradients(quick, config)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    largest = max(float(true.abs().max()) for true in expected.values())
    for key, true in expected.items():
        torch.testing.assert_close(found[key], true, rtol=1e-4, atol=1e-5 * largest)


@needs_compiler
def test_bfloat16_attends_in_the_kernel_and_multiplies_in_torch(monkeypatch):
    model = build(NANO).train()
    install_training_kernels(model, CPU)
    seen = []
    monkeypatch.setattr(modules, "attention", lambda q, *rest: seen.append(q.dtype) or q)
    monkeypatch.setattr(modules, "feed_forward", lambda *given: pytest.fail("in bfloat16"))
    with torch.autocast("cpu", torch.bfloat16):
        model(batch(NANO).inputs)
    assert seen == [torch.bfloat16] * 2


@needs_compiler
def test_evaluation_masks_dropout_taps_and_other_types_stay_with_the_engine(monkeypatch):
    for name in ("attention", "feed_forward"):
        monkeypatch.setattr(modules, name, lambda *given: pytest.fail("the kernel was called"))
    model = build(NANO)
    install_training_kernels(model, CPU)
    inputs = batch(NANO).inputs
    model.eval()(inputs)
    model.double().train()(inputs)
    for block in model.blocks:
        block.feedforward.eval()
        block.attention.dropout = 0.5
    model.float()(inputs)
    for block in model.blocks:
        block.attention.dropout = 0.0
    mask = torch.ones_like(inputs, dtype=torch.bool)
    mask[0, -3:] = False
    model(inputs, mask)


@needs_compiler
def test_a_tap_still_sees_what_lies_inside():
    model = lively(NANO)[0].float().train()
    install_training_kernels(model, CPU)
    trace = gf.trace(model, batch(NANO).inputs)
    assert "blocks.0.feedforward.post" in trace
    assert "blocks.1.attention.pattern" in trace


@needs_compiler
@pytest.mark.parametrize(
    "changes",
    [{"n_heads": 4}, {"d_ff": 48}, {"d_model": 24, "n_heads": 2}, {"feedforward__activation": "relu"}],
)
def test_shapes_and_functions_without_a_kernel_are_left_alone(changes):
    model = build(gf.config.replace(NANO, **changes)).train()
    install_training_kernels(model, CPU)
    kinds = {type(m) for m in model.modules()}
    assert not kinds >= {modules.NativeAttention, modules.NativeDense}
    gradients(model, NANO)


def test_without_a_compiler_the_engine_trains(monkeypatch):
    def refuse():
        raise cxx.CompileError("no C++ compiler was found.")

    monkeypatch.setattr(kernels.library, "load", refuse)
    model = build(NANO)
    assert not install_training_kernels(model, CPU)
    assert not any(isinstance(m, modules.NativeAttention | modules.NativeDense) for m in model.modules())


@needs_compiler
@pytest.mark.parametrize(
    ("bits", "intel", "width", "attends", "multiplies"),
    [
        (512, False, 384, True, True),
        (512, False, 512, True, False),
        (512, True, 128, True, False),
        (256, False, 128, True, True),
        (256, False, 256, True, False),
        (256, True, 128, True, False),
        (128, False, 128, False, False),
    ],
)
def test_a_run_takes_the_kernels_that_were_measured_to_be_faster(bits, intel, width, attends, multiplies, monkeypatch):
    monkeypatch.setattr(cxx, "register_bits", lambda: bits)
    monkeypatch.setattr(cxx, "is_intel", lambda: intel)
    machine = Machine(device="cpu", precision="float32", compile="auto")
    run = Run(gf.config.replace(NANO, d_model=width), schedule=Schedule("constant", warmup=0), machine=machine)
    state = prepare_state(run)
    kinds = {type(module) for module in state.model.modules()}
    assert bool(state.kernels) is attends
    assert (modules.NativeAttention in kinds) is attends
    assert (modules.NativeDense in kinds) is multiplies


@needs_compiler
def test_steps_of_a_run_are_those_of_the_engine(monkeypatch):
    """`auto` takes the kernels, `no` the engine; the losses of ten steps agree."""
    monkeypatch.setattr(cxx, "register_bits", lambda: 512)
    monkeypatch.setattr(cxx, "is_intel", lambda: False)
    losses = {}
    for wanted in ("auto", "no"):
        machine = Machine(device="cpu", precision="float32", compile=wanted)
        state = prepare_state(Run(NANO, schedule=Schedule("constant", warmup=0), machine=machine))
        assert bool(state.kernels) == (wanted == "auto")
        losses[wanted] = [float(train_step(state, batch(NANO))["loss"]) for _ in range(10)]
    assert losses["auto"] == pytest.approx(losses["no"], rel=1e-4)
    assert losses["auto"] != losses["no"]  # or nothing was compared
    assert losses["auto"][-1] < losses["auto"][0] - 0.3
