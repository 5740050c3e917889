"""The activation is found by fitting, and exact GELU is not tanh GELU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glassformer.anatomy.trace import Linear
from glassformer.doctor.probes import activation
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Verdict
from tests.bugs import healthy_traps as traps
from tests.doctor.probes.subjects import BUGS, bert, buggy, gpt2, rotary, warmed


def test_each_model_shows_its_own():
    assert {names[0] for names in activation.found_activations(gpt2()).values()} == {"gelu_tanh"}
    assert {names[0] for names in activation.found_activations(bert()).values()} == {"gelu"}
    assert all(activation.as_declared(make()).passed for make in (gpt2, bert, rotary))


@pytest.mark.parametrize("id", ["exact_gelu_one_layer", "relu_gate", "activation_missing"])
def test_another_one_is_found_with_its_layer(id):
    finding = activation.as_declared(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert BUGS[id].layer in (None, finding.evidence["layer"])


@pytest.mark.parametrize("name", [n for n in activation.ACTIVATION_FUNCTIONS if n != "identity"])
def test_every_function_is_distinguished_from_the_others(name):
    torch.manual_seed(0)
    u, gate = 2 * torch.randn(40, 32), torch.randn(40, 32)
    first, second = Linear(0, u, u, ""), Linear(1, gate, gate, "")
    f = activation.ACTIVATION_FUNCTIONS[name]
    assert activation.between(Linear(2, f(u), u, "", (first,)))[0] == name
    assert activation.between(Linear(2, f(u) * gate, u, "", (first, second)))[0] == name
    fused = Linear(0, u, torch.cat([u, gate], dim=-1), "")
    assert activation.between(Linear(2, f(u) * gate, u, "", (fused,)))[0] == name


def test_a_function_of_no_known_name_is_still_seen():
    torch.manual_seed(0)
    u, other = 2 * torch.randn(40, 32), torch.randn(40, 32)
    first = Linear(0, u, u, "")
    steep = torch.nn.functional.leaky_relu(u, 0.1)
    assert activation.between(Linear(2, steep, u, "", (first,))) == [activation.OTHER]
    assert activation.between(Linear(2, other, u, "", (first,))) == []
    assert activation.between(Linear(2, torch.zeros_like(u), u, "", (first,))) == []


class Routed(nn.Module):
    """A block whose router has a GELU of its own, next to a feed-forward with ReLU."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=31, hidden_act="relu", d_model=16)
        self.embed, self.blocks = nn.Embedding(31, 16), nn.ModuleList(RoutedBlock() for _ in range(2))
        self.head = nn.Linear(16, 31)

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RoutedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.router, self.choose = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        gate = self.choose(nn.functional.gelu(self.router(self.enter(x)))).softmax(-1)[..., :1]
        return x + gate * self.down(self.up(x).relu())


def test_the_activation_of_a_router_is_not_taken_for_the_feed_forwards():
    torch.manual_seed(0)
    subject = subject_of(Routed(), "decoder")
    assert {names[0] for names in activation.found_activations(subject).values()} == {"relu"}
    assert activation.as_declared(subject).passed


def test_half_precision_and_sharp_attention_show_the_same_activation():
    model = traps.nano_style()
    for block in model.transformer["h"]:
        block.attn.c_attn.weight.data[:96] *= 40
    assert activation.as_declared(warmed(model, kind="decoder")).passed
    assert activation.as_declared(warmed(model.bfloat16(), kind="decoder")).passed


def test_a_config_that_contradicts_itself_declares_both():
    subject = bert()
    facts = replace(subject.facts, raw={**subject.facts.raw, "act": "relu"})
    assert activation.as_declared(replace(subject, facts=facts)).passed
