"""The tour's claims and its two examinations: right where they should be, and able to fail."""

import dataclasses

import pytest

import glassformer as gf
from glassformer.doctor.report import Diagnosis, Report
from glassformer.tour import theory as tour_theory


@pytest.fixture(scope="module")
def model():
    return gf.build(gf.presets.nano(n_layers=1, d_model=32, n_heads=2, d_ff=64, vocab_size=31, max_len=48), seed=0)


def test_a_claim_and_its_control_are_two_findings():
    (proof,) = tour_theory.prove(("rope-relative",))
    holds, turns = proof.findings
    assert holds.passed
    assert turns.passed
    assert proof.turned > 0
    assert proof.mistake[0] == "Ch. 13 ex. 8"
    assert "$" not in "".join((proof.title, proof.control, *proof.mistake))


def test_a_claim_that_fails_and_a_control_that_does_not_are_failures():
    (proof,) = tour_theory.prove(("rope-relative",))
    failed = dataclasses.replace(proof.whole, finding=proof.broken.finding)
    idle = dataclasses.replace(proof.broken, finding=proof.whole.finding)
    holds, turns = tour_theory.Proof(failed, idle).findings
    assert not holds.passed
    assert not turns.passed


def test_a_claim_without_a_mistake_in_its_sources_names_none():
    (proof,) = tour_theory.prove(("rope-relative",))
    claim = dataclasses.replace(proof.whole.claim, errata=())
    assert tour_theory.Proof(dataclasses.replace(proof.whole, claim=claim), proof.broken).mistake is None


def test_the_doctor_clears_the_model_and_names_the_missing_mask(model):
    healthy, sick = tour_theory.consult(model)
    assert healthy.report.healthy
    assert healthy.finding.passed
    assert sick.report.diagnoses[0].id == "causal_leak"
    assert sick.finding.passed
    assert model.decoder.causal  # the mask was taken off a copy


def test_a_doctor_who_is_wrong_is_a_failure(model, monkeypatch):
    leak = Diagnosis("causal_leak", "a place sees tokens after it", {}, (), "mask it")
    sick, well = Report("x", "decoder", (leak,), ()), Report("x", "decoder", (), ())
    for said, verdicts in ((sick, [False, True]), (well, [True, False])):
        monkeypatch.setattr(tour_theory, "diagnose", lambda *_, said=said, **__: said)
        assert [one.finding.passed for one in tour_theory.consult(model)] == verdicts
