"""A model is restored bit for bit, and a copy that is not one is recognised."""

import copy

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.doctor.subject.snapshot import Snapshot, copies_faithfully, referenced
from tests.bugs.healthy_traps import closure_blocks
from tests.doctor.probes.subjects import Copycat

TOKENS = torch.arange(10).view(2, 5)


def faithful(model):
    return copies_faithfully(model, lambda m: m(TOKENS))


def state(model):
    """Everything that must be the same afterwards, by value."""
    return {
        "weights": {n: (id(p), p.data_ptr(), p.dtype, p.requires_grad) for n, p in model.named_parameters()},
        "values": [t.clone() for t in model.state_dict().values()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def same(one, two):
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, list):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return one == two


def test_everything_is_restored_whatever_was_done_to_it():
    model = Copycat().train()
    model.register_buffer("table_of", torch.arange(4.0))
    model.kept = {"calls": [1]}
    model.head.bias.requires_grad_(False)
    model(TOKENS).sum().backward()
    before, snapshot = state(model), Snapshot(model)
    model.double().eval().requires_grad_(True)
    model.zero_grad()
    model.kept["calls"].append(2)
    model.extra = nn.Linear(2, 2)
    model.head.register_forward_hook(lambda *a: None)
    with torch.no_grad():
        model.table.weight.mul_(3)
        model.table_of += 1
    torch.rand(3)
    assert not same(state(model), before)
    snapshot.restore()
    assert same(state(model), before)
    assert model.kept == {"calls": [1]}
    assert not hasattr(model, "extra")


class Lambda(Copycat):
    def __init__(self):
        super().__init__()
        self.final = lambda x: self.head(x)

    def forward(self, idx):
        return self.final(self.table(idx))


class Refuses(Copycat):
    def __deepcopy__(self, memo):
        raise RuntimeError("not copied")


class Forgets(Copycat):
    """Its copy starts afresh."""

    def __deepcopy__(self, memo):
        made = type(self)()
        nn.init.normal_(made.head.weight)
        return made


OUTSIDE = nn.Linear(16, 23)


class Elsewhere(Copycat):
    """It refers to the module of a global variable, which no copy holds."""

    def __init__(self):
        super().__init__()
        self.head = OUTSIDE

    def forward(self, idx):
        return OUTSIDE(self.table(idx))


class Draws(Copycat):
    def forward(self, idx):
        return super().forward(idx) + torch.rand(1)


@pytest.mark.parametrize("made", [Lambda, Refuses, Forgets, Elsewhere, closure_blocks])
def test_a_copy_that_is_none_is_recognised_and_the_model_left_alone(made):
    model = made().train()
    before = state(model)
    assert not faithful(model)
    assert same(state(model), before)


@pytest.mark.parametrize("made", [Copycat, Draws])
def test_a_copy_that_computes_alone_is_one(made):
    assert faithful(made())


def test_closures_and_defaults_are_followed():
    inner, other = nn.Linear(2, 2), nn.Linear(3, 3)
    model = nn.Module()
    model.act = lambda x, layer=inner: other(layer(x))
    found = {id(value) for value in referenced(copy.deepcopy(model))}
    assert {id(inner), id(other)} <= found


def test_the_doctor_finds_a_closure_model_healthy_and_leaves_it_bit_for_bit():
    model = closure_blocks()
    model(TOKENS, TOKENS)[1].backward()
    model.transformer["wpe"].weight.requires_grad_(False)
    before = state(model)
    report = gf.diagnose(model)
    assert report.healthy, report.text()
    assert same(state(model), before)


def test_a_closure_model_with_a_bug_is_still_diagnosed():
    model = closure_blocks()
    block = model.transformer["h"][1]
    norm, mlp = block.ln_2, block.mlp
    block.feed = lambda x: mlp["down"](mlp["act"](mlp["up"](norm(x) + x.mean(1, keepdim=True))))
    before = state(model)
    report = gf.diagnose(model, quick=True)
    assert report.diagnoses[0].id == "causal_leak"
    assert report.diagnoses[0].layer == 1
    assert same(state(model), before)
