"""The sum of a block is fitted from its parts."""

import pytest
import torch

from glassformer.checks import blocks
from glassformer.finding import Verdict
from tests.checks.patients import BUGS, bert, failures, gpt2, names, rotary, sick


@pytest.mark.parametrize("make", [gpt2, rotary, bert])
def test_correct_wiring_passes(make):
    findings = list(blocks.wiring(make()))
    assert [f.verdict for f in findings] == [Verdict.PASS]
    assert failures(blocks.residual_growth(make())) == []


@pytest.mark.parametrize("id", ["residual_from_norm", "post_for_pre"])
def test_other_wiring_is_found(id):
    (finding,) = blocks.wiring(sick(id))
    assert finding.id == "norm_placement/sum"
    assert finding.verdict is Verdict.FAIL
    assert BUGS[id].layer in (None, finding.evidence["layer"])


def test_a_loud_layer_grows_the_stream():
    assert names(blocks.residual_growth(sick("loud_layer"))) == {"residual_growth"}


def test_a_stream_added_twice_is_growth_with_its_factor():
    subject = gpt2()
    with subject.patient() as patient:
        (block, *_) = blocks.watch_blocks(patient)
    twice = blocks.Block(block.name, block.before, block.after + block.before, block.parts, block.norms)
    found, left = blocks.fit(twice.after, [twice.before, *(o for _, o in twice.parts.values())])
    assert left < 1e-4
    assert found[0] == pytest.approx(2, abs=1e-3)
    finding = blocks._judge(subject, twice)
    assert finding.id == "residual_growth/sum"


def test_freshness_is_read_from_the_gains():
    with gpt2().patient() as patient:
        assert blocks.is_fresh(patient.model)
        with torch.no_grad():
            patient.model.decoder.norm.weight[0] = 2.0
        assert not blocks.is_fresh(patient.model)
