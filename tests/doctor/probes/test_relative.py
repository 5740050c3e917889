"""Relative schemes: what breaks them is distinguished."""

import copy
from types import SimpleNamespace

import pytest
import torch

import glassformer as gf
from glassformer.doctor.probes import positions, relative
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.declared import declared
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, buggy, failures, gpt2, names, rotary, t5, warmed


def findings(subject):
    constant = positions.repeated_token(subject)
    yield from positions.positions_are_used(subject, constant)
    yield from relative.relative_positions(subject, constant)


@pytest.mark.parametrize("make", [rotary, t5])
def test_correct_relative_schemes_pass(make):
    found = list(findings(make()))
    assert failures(found) == []
    assert any(f.id.startswith("rope_relative/") and f.verdict is Verdict.PASS for f in found)


def test_absolute_schemes_are_not_judged():
    (finding,) = relative.relative_positions(gpt2(), positions.repeated_token(gpt2()))
    assert finding.verdict is Verdict.SKIP


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "id",
    ["rotates_queries_only", "angles_in_bfloat16", "opposite_turns", "base_ignored", "turned_by_head",
     "pairs_on_halves",
     "other_pairing", "values_turned", "values_turned_one_layer"],
)  # fmt: skip
def test_each_fault_of_a_rotation_has_its_own_name(id):
    assert BUGS[id].diagnosis in names(findings(buggy(id)))


def test_the_declared_base_is_not_judged_under_a_scaling():
    class Facts:
        def __init__(self, **raw):
            self.raw = raw

        def number(self, name):
            return 1e4

    class Has:
        def __init__(self, **raw):
            self.facts = Facts(**raw)

    assert relative.declared_base(Has()) == 1e4
    assert relative.declared_base(Has(rope_scaling={"rope_type": "yarn"})) is None
    assert relative.declared_base(Has(rope_parameters={"rope_type": "default", "rope_theta": 5e5})) == 5e5
    # each layer, or each type of layer, may have a base of its own
    assert relative.declared_base(Has(rope_bases=[2e4, None]), 0) == 2e4
    assert relative.declared_base(Has(rope_bases=[2e4, None]), 1) is None
    tables = {"full_attention": {"rope_theta": 3e5}, "sliding_attention": {"rope_theta": 4e4}}
    kinds = ["sliding_attention", "full_attention"]
    assert [relative.declared_base(Has(rope_parameters=tables, layer_types=kinds), i) for i in (0, 1)] == [4e4, 3e5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_of_half_precision_weights_are_judged_by_their_own_rounding(dtype):
    subject = warmed(copy.deepcopy(rotary().model).to(dtype))
    assert failures(findings(subject)) == []
    broken = buggy("rotates_queries_only")
    broken.model.to(dtype)
    assert names(findings(broken))


def test_a_bias_that_is_rounded_by_design_is_not_judged_by_shifts():
    config = gf.presets.nano(vocab_size=61, n_layers=2, d_model=32, n_heads=3, d_head=8, d_ff=48, max_len=180)
    model = gf.build(gf.config.replace(config, position=gf.config.Alibi(rounded=True)))
    found = list(findings(warmed(model)))
    assert failures(found) == []
    assert any("rounded by design" in f.why for f in found)


def test_a_rotation_that_the_longest_position_changes_is_not_judged_by_shifts():
    """Frequencies for long contexts apply to all tokens of a sequence as soon as one position is far enough."""
    scaling = gf.config.LongScaling((1.0,) * 4, (4.0,) * 4, original_max_len=32)
    config = gf.presets.nano(vocab_size=61, n_layers=2, d_model=32, n_heads=4, d_head=8, d_ff=48, max_len=180)
    model = gf.build(gf.config.replace(config, position=gf.config.Rotary(scaling=scaling)))
    found = list(findings(warmed(model)))
    assert failures(found) == []
    assert any(f.why == relative.LONGEST for f in found)


def test_a_rotated_fraction_may_be_declared_for_each_type_of_layer():
    tables = {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {"partial_rotary_factor": 0.25}}
    subject = SimpleNamespace(facts=declared(None, {"rope_parameters": tables, "layer_types": [*tables][::-1]}))
    assert [relative.declared_fraction(subject, i) for i in (0, 1)] == [0.25, 0.5]
    subject = SimpleNamespace(facts=declared(None, {"rope_parameters": {"partial_rotary_factor": 0.4}}))
    assert relative.declared_fraction(subject, 3) == 0.4
    assert relative.declared_fraction(SimpleNamespace(facts=declared(None))) is None


def test_the_base_of_an_odd_number_of_components_is_not_judged():
    (rotation, *_) = relative._rotations(rotary(), positions.repeated_token(rotary()))
    facts = declared(None, {"rope_base": 500.0, "partial_rotary_factor": 1.0})
    (finding,) = relative._as_declared(SimpleNamespace(facts=facts), [rotation])
    assert (finding.id, finding.verdict) == ("rope_relative/base", Verdict.FAIL)
    facts = declared(None, {"rope_base": 500.0, "rope_parameters": {"partial_rotary_factor": 0.9, "rope_theta": 500.0}})
    assert list(relative._as_declared(SimpleNamespace(facts=facts), [rotation])) == []


class Undeclared(torch.nn.Module):
    """Rotary positions that no name and no config declares."""

    def __init__(self, backwards=False, values=False):
        super().__init__()
        self.e, self.qkv, self.o = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 31)
        self.sign, self.values = -1 if backwards else 1, values

    def turn(self, x, sign=1):
        angle = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(8) / 8)
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), sign * angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, tokens):
        x = self.e(tokens)
        q, k, v = self.qkv(x).split(16, -1)
        q, k, v = self.turn(q), self.turn(k, self.sign), self.turn(v) if self.values else v
        scores = (q @ k.mT / 4).masked_fill(torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool(), -torch.inf)
        return self.o(x + scores.softmax(-1) @ v)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [({}, set()), ({"backwards": True}, {"rope_relative"}), ({"values": True}, {"rope_values"})],
)
def test_a_rotation_is_judged_although_nothing_declares_it(faults, expected):
    torch.manual_seed(0)
    subject = subject_of(Undeclared(**faults), kind="decoder")
    found = list(findings(subject))
    assert {f.id.split("/")[0] for f in found if f.verdict is Verdict.FAIL} == expected
    assert any(f.id == "rope_relative/distance" for f in found)
