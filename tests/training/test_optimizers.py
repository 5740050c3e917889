"""AdamW is AdamW, Muon's update is orthogonal, state survives."""

import itertools

import pytest
import torch

from glassformer.config.optimizer import rule_for
from glassformer.model import build
from glassformer.training.optimizers import Average, Optimizer, clip, factor, gradient_norm
from glassformer.training.run import Optim, Schedule
from tests import variants
from tests.variants import tokens


def with_gradients(model, seed=0):
    ids = tokens(3, 9, seed)
    torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return model


def test_adamw_equals_a_plain_adamw():
    """Against torch's unfused implementation with the groups written out.

    In float64: a key bias has no gradient but rounding noise, which AdamW would blow up to full steps.
    """
    ours, theirs = (build(variants.decoder(), dtype=torch.float64) for _ in range(2))
    optimizer = Optimizer(ours, Optim(lr=0.01, weight_decay=0.3))
    named = dict(theirs.named_parameters())
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() == 2 and p is not named["decoder.position.weight"]]},
            {
                "params": [p for p in named.values() if p.dim() == 1 or p is named["decoder.position.weight"]],
                "weight_decay": 0.0,
            },
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=0.3,
        foreach=False,
    )
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        with_gradients(ours, step)
        with_gradients(theirs, step)
        optimizer.step(1.0)
        plain.step()
    for name, p in ours.named_parameters():
        assert torch.allclose(p, named[name], atol=1e-12), name


def test_muon_updates_hidden_matrices_by_nearly_orthogonal_steps():
    """Five Newton-Schulz steps bring the singular values of a well-conditioned gradient into [0.6, 1.3]."""
    model = build(variants.decoder(d_model=48, d_ff=192, attention=variants.c.Attention(n_heads=4)))
    optimizer = Optimizer(model, Optim(kind="muon", muon_lr=0.5, weight_decay=0.0))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step(1.0)
    for name in ("feedforward.up.weight", "feedforward.down.weight"):
        p = model.get_parameter(f"decoder.blocks.0.{name}")
        update = (p.detach() - before[f"decoder.blocks.0.{name}"]) / 0.5
        values = torch.linalg.svdvals(update / max(1, p.shape[0] / p.shape[1]) ** 0.5)
        assert values.min() > 0.6, name
        assert values.max() < 1.3, name


def test_batched_muon_equals_torchs_own():
    """Ours stacks matrices of one shape; the result must be torch.optim.Muon's, to bf16 rounding of the iteration."""
    ours, theirs = build(variants.decoder(n_layers=3)), build(variants.decoder(n_layers=3))
    matrices = [n for n, _ in ours.named_parameters() if rule_for(n).matrix]
    optimizer = Optimizer(ours, Optim(kind="muon", muon_lr=0.02, weight_decay=0.3))
    plain = torch.optim.Muon(
        [theirs.get_parameter(n) for n in matrices], lr=0.02, momentum=0.95, weight_decay=0.3, adjust_lr_fn="original"
    )
    for step in range(4):
        for name in matrices:
            gradient = torch.randn(ours.get_parameter(name).shape, generator=torch.Generator().manual_seed(step))
            ours.get_parameter(name).grad = gradient.clone()
            theirs.get_parameter(name).grad = gradient.clone()
        optimizer.step(1.0)
        plain.step()
    for name in matrices:
        difference = (ours.get_parameter(name) - theirs.get_parameter(name)).abs().max()
        assert difference < 4 * 0.02 * 2**-6, name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_survives_bit_for_bit(kind):
    a, b = build(variants.decoder()), build(variants.decoder())
    first, second = Optimizer(a, Optim(kind=kind)), Optimizer(b, Optim(kind=kind))
    for step in range(3):
        first.zero_grad()
        with_gradients(a, step)
        first.step(1.0)
    b.load_state_dict(a.state_dict())
    second.load_state({name: t.clone() for name, t in first.state().items()})
    for model, optimizer in ((a, first), (b, second)):
        optimizer.zero_grad()
        with_gradients(model, 9)
        optimizer.step(0.5)
    for name, p in a.named_parameters():
        assert torch.equal(p, b.get_parameter(name)), name


def test_foreign_state_is_refused():
    optimizer = Optimizer(build(variants.decoder()), Optim())
    with pytest.raises(ValueError, match="belong to no parameter"):
        optimizer.load_state({"unknown/step": torch.zeros(())})


@pytest.mark.parametrize("fused", [True, False])
def test_loaded_step_counters_are_where_the_kernel_reads_them(fused):
    """A fused kernel reads them through their address: a counter on the CPU is an illegal memory access on a GPU."""
    held = Optimizer(with_gradients(build(variants.decoder())), Optim())
    held.step(1.0)
    elsewhere = Optimizer(build(variants.decoder(), device="meta"), Optim())  # stands for a GPU
    for group in elsewhere.members[0][0].param_groups:
        group["fused"] = fused
    elsewhere.load_state(held.state())
    for state in elsewhere.members[0][0].state.values():
        assert state["step"].device.type == ("meta" if fused else "cpu")
        assert state["exp_avg"].device.type == "meta"


def test_clipping_limits_the_whole_gradient():
    model = with_gradients(build(variants.decoder()))
    parameters = list(model.parameters())
    whole = torch.cat([p.grad.flatten() for p in parameters]).norm()
    norm = gradient_norm(parameters)
    assert torch.isclose(norm, whole)
    clip(parameters, norm, None)
    assert torch.isclose(gradient_norm(parameters), whole)
    clip(parameters, norm, 0.01)
    assert gradient_norm(parameters).item() == pytest.approx(0.01, rel=1e-3)


def test_average_follows_its_formula_and_swaps_back():
    model = build(variants.decoder())
    average = Average(model, 0.5)
    first = model.embed.tokens.weight.detach().clone()
    with torch.no_grad():
        model.embed.tokens.weight.add_(1.0)
    average.update(model, 1000)
    assert torch.allclose(average.weights["embed.tokens.weight"], first + 0.5)
    held = {n: p.detach().clone() for n, p in model.named_parameters()}
    average.swap(model)
    assert torch.allclose(model.embed.tokens.weight, first + 0.5)
    average.swap(model)
    assert all(torch.equal(p, held[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_warm_up_is_a_straight_line_to_one(kind):
    schedule = Schedule(kind=kind, warmup=4)
    assert [factor(schedule, s, 100) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("kind", "end"), [("constant", 1.0), ("cosine", 0.1), ("wsd", 0.1)])
def test_the_last_step_is_at_the_floor(kind, end):
    schedule = Schedule(kind=kind, warmup=10, floor=0.1)
    assert factor(schedule, 99, 100) == pytest.approx(end)
    factors = [factor(schedule, s, 100) for s in range(10, 100)]
    assert all(a >= b for a, b in itertools.pairwise(factors))


def test_cosine_is_half_way_in_the_middle():
    assert factor(Schedule(kind="cosine", warmup=0, floor=0.0), 50, 101) == pytest.approx(0.5)


def test_wsd_stays_until_its_decay():
    schedule = Schedule(kind="wsd", warmup=10, floor=0.0, decay=0.2)
    assert all(factor(schedule, s, 100) == 1.0 for s in range(10, 81))
    assert factor(schedule, 99, 100) == 0.0
    assert factor(schedule, 90, 101) == pytest.approx(1 - 9 / 19)


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_a_run_of_one_step_works(kind):
    assert 0 <= factor(Schedule(kind=kind, warmup=0), 0, 1) <= 1


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("failed", [True, False])
def test_a_step_can_fail_and_shrink_its_gradients_on_the_device(kind, failed):
    """A failed step changes no parameter and no state; another one multiplies the gradients while it reads them."""
    models = [build(variants.decoder(), seed=0) for _ in range(2)]
    ours, plain = (Optimizer(model, Optim(kind=kind)) for model in models)
    for step in range(2):
        for model, optimizer in zip(models, (ours, plain), strict=True):
            optimizer.zero_grad()
            with_gradients(model, step)
            if step == 0:
                optimizer.step(1.0)
    before = {name: p.detach().clone() for name, p in models[0].named_parameters()} | ours.state()
    before = {name: tensor.clone() for name, tensor in before.items()}
    if failed:
        next(models[0].parameters()).grad.fill_(float("nan"))
    ours.set_rate(1.0)
    ours.step_unless(torch.tensor(float(failed)), torch.tensor(0.25))
    for p in models[1].parameters():
        p.grad *= 0.25
    if not failed:
        plain.step(1.0)
    after = dict(models[0].named_parameters()) | ours.state()
    wanted = before if failed else dict(models[1].named_parameters()) | plain.state()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0 if failed else 1e-5, atol=0 if failed else 1e-7)
