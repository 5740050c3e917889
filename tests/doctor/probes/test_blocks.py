"""The sum of a block is fitted from its parts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import blocks
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.declared import declared
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, Copycat, bert, buggy, failures, gpt2, names, rotary


@pytest.mark.parametrize("make", [gpt2, rotary, bert])
def test_correct_wiring_passes(make):
    findings = list(blocks.wiring(make()))
    assert [f.verdict for f in findings] == [Verdict.PASS]
    assert failures(blocks.residual_growth(make())) == []


@pytest.mark.parametrize("id", ["residual_from_norm", "post_for_pre"])
def test_other_wiring_is_found(id):
    (finding,) = blocks.wiring(buggy(id))
    assert finding.id == "norm_placement/sum"
    assert finding.verdict is Verdict.FAIL
    assert BUGS[id].layer in (None, finding.evidence["layer"])


class Post(nn.Module):
    """Post-norm: `lost` leaves the stream out before the first norm."""

    def __init__(self, lost):
        super().__init__()
        self.attention, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.n1, self.n2, self.lost = nn.LayerNorm(16), nn.LayerNorm(16), lost

    def forward(self, x):
        x = self.n1(self.attention(x) if self.lost else x + self.attention(x))
        return self.n2(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize("lost", [False, True])
def test_a_norm_that_reads_a_part_without_the_stream_is_found(lost):
    class Net(Copycat):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Post(lost) for _ in range(2))

        def forward(self, idx):
            x = self.table(idx)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    (finding,) = blocks.wiring(subject_of(Net()))
    assert finding.verdict is (Verdict.FAIL if lost else Verdict.PASS)
    assert finding.evidence.get("module") == ("n1" if lost else None)


def test_biases_and_inner_norms_explain_growth():
    block = nn.ModuleDict({"o": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
    assert blocks._biases(block, 16) == pytest.approx(float(block["o"].bias.detach().square().mean()))
    assert not blocks._norms_inside(block)
    assert blocks._norms_inside(nn.ModuleDict({"attention": block}))
    assert not blocks._norms_inside(nn.ModuleDict({"attention": nn.ModuleDict({"q_norm": nn.LayerNorm(16)})}))


def test_a_loud_layer_grows_the_stream():
    assert names(blocks.residual_growth(buggy("loud_layer"))) == {"residual_growth"}


def test_a_stream_added_twice_is_growth_with_its_factor():
    subject = gpt2()
    with subject.isolated() as isolated:
        (block, *_) = blocks.watch_blocks(isolated)
    twice = blocks.Block(block.name, block.before, block.after + block.before, block.parts, block.norms)
    found, left = blocks.fit(twice.after, [twice.before, *(o for _, o in twice.parts.values())])
    assert left < 1e-4
    assert found[0] == pytest.approx(2, abs=1e-3)
    finding = blocks._judge(subject, twice)
    assert finding.id == "residual_growth/sum"


@pytest.mark.parametrize("gate", [torch.tensor(0.1), torch.full((16,), 0.1)])
def test_a_learned_gate_on_a_branch_is_by_design(gate):
    """ReZero's scalar and LayerScale's vector before training; a gain of a norm that differs by element is none."""
    block = nn.ModuleDict({"norm": nn.LayerNorm(16)})
    with torch.no_grad():
        block["norm"].weight.uniform_(0.09, 0.11)
    assert not blocks._is_kept(0.1, blocks._numbers(block))
    block.gate = nn.Parameter(gate)
    assert blocks._is_kept(0.1, blocks._numbers(block))
    assert not blocks._is_kept(0.2, blocks._numbers(block))


def test_freshness_is_read_from_the_gains():
    with gpt2().isolated() as isolated:
        assert blocks.is_fresh(isolated.model)
        with torch.no_grad():
            isolated.model.decoder.norm.weight[0] = 2.0
        assert not blocks.is_fresh(isolated.model)


def test_factors_of_one_declare_no_growth_and_those_for_the_stream_allow_a_normed_one():
    subject = gpt2()
    for fields, factors, weighs in (
        ({"residual_multiplier": 1.0, "multiplier_on": True}, [], False),
        ({"residual_multiplier": 0.4}, ["residual_multiplier"], False),
        ({"mlp_alpha_factor": 1}, [], True),
    ):
        changed = replace(subject, facts=declared(None, fields))
        assert blocks._residual_factors(changed) == factors
        assert blocks._weighs_the_stream(changed) is weighs
