"""Norms read one token, with the declared formula."""

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import norms, subject_of
from glassformer.finding import Verdict
from tests.bugs.idioms import by_hand
from tests.doctor.probes.subjects import bert, buggy, failures, gpt2, listed, rotary


@pytest.mark.parametrize("make", [gpt2, rotary, bert])
def test_correct_norms_pass(make):
    assert norms.each_token_by_itself(make()).passed
    assert failures(norms.eps_as_declared(make())) == []


@pytest.mark.parametrize(("id", "over"), [("norm_over_time", "time"), ("norm_over_batch", "batch")])
def test_statistics_over_other_tokens_are_found(id, over):
    finding = norms.each_token_by_itself(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert finding.evidence["over"] == over


@pytest.mark.parametrize("id", ["eps_1e_12", "eps_1e_3", "unbiased_variance", "eps_outside"])
def test_other_formulas_are_found(id):
    assert failures(norms.eps_as_declared(buggy(id))) == ["norm_eps/formula"]


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-5, 1e-3])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_eps_is_solved_for(kind, eps):
    module = kind(24, eps=eps).double()
    with torch.no_grad():
        nn.init.uniform_(module.weight, 0.5, 1.5)
        found = norms.formula_of(norms.Norm("n", module, torch.randn(2, 3, 24)))
    assert found.eps == pytest.approx(eps, rel=1e-3)
    assert not found.outside
    assert found.factor == pytest.approx(1, abs=1e-6)
    assert found.centred is (kind is nn.LayerNorm)


def test_what_is_a_norm_and_what_is_not():
    assert norms.is_norm(nn.LayerNorm(4))
    assert not norms.is_norm(nn.Linear(4, 4))
    assert not norms.is_norm(nn.Embedding(4, 4))
    assert listed(norms.eps_as_declared(gpt2()))


class InFloat32(nn.Module):
    """An RMS norm that computes in float32, eps outside the root or under it, and a model that fails in float64."""

    def __init__(self, eps, outside):
        super().__init__()
        self.weight, self.eps, self.outside = nn.Parameter(torch.ones(16)), eps, outside

    def forward(self, x):
        square = x.float().square().mean(-1, keepdim=True)
        root = square.sqrt() + self.eps**0.5 if self.outside else (square + self.eps).sqrt()
        return x.float() / root * self.weight.float()


@pytest.mark.parametrize("outside", [False, True])
def test_norms_of_a_model_that_computes_in_float32_only(outside):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"vocab_size": 29, "norm_eps": 1e-6}
            self.table, self.norm, self.head = nn.Embedding(29, 16), InFloat32(1e-6, outside), nn.Linear(16, 29)

        def forward(self, tokens):
            return self.head(self.norm(self.table(tokens)))

    wanted = ["norm_eps/formula"] if outside else []
    findings = listed(norms.eps_as_declared(subject_of(Model(), kind="decoder")))
    assert [f.id for f in findings if f.verdict is Verdict.FAIL] == wanted
    assert findings[0].verdict is not Verdict.SKIP


def test_a_narrow_norm_before_the_others_does_not_hide_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"vocab_size": 29, "norm_eps": 1e-6}
            self.table, self.first, self.wide = nn.Embedding(29, 8), nn.LayerNorm(8, eps=1e-6), nn.Linear(8, 16)
            self.norms = nn.ModuleList(nn.LayerNorm(16, eps=eps) for eps in (1e-6, 1e-3, 1e-6))
            self.head = nn.Linear(16, 29)

        def forward(self, tokens):
            x = self.wide(self.first(self.table(tokens)))
            for norm in self.norms:
                x = x + norm(x)
            return self.head(x)

    (finding,) = norms.eps_as_declared(subject_of(Model(), kind="decoder"))
    assert (finding.verdict, finding.evidence["module"]) == (Verdict.FAIL, "norms.1")


@torch.no_grad()
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_a_norm_whose_eps_has_another_name_is_solved_for(eps):
    module = by_hand.Norm(24, 1e-6, eps).double()
    assert norms.formula_of(norms.Norm("n", module, torch.randn(2, 3, 24))).eps == pytest.approx(eps, rel=1e-3)


def test_a_map_without_a_norm_is_none():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(24)), 1e-5

        def forward(self, x):
            return x * self.weight

    assert norms.formula_of(norms.Norm("n", Scaled(), torch.randn(2, 3, 24))) is None
