"""The diagnoses of the tour: correct for both models, and a wrong doctor is a failure."""

import pytest

import glassformer as gf
from glassformer.doctor.report import Diagnosis, Report
from glassformer.tour import diagnosis


@pytest.fixture(scope="module")
def model():
    return gf.build(gf.presets.nano(n_layers=1, d_model=32, n_heads=2, d_ff=64, vocab_size=31, max_len=48), seed=0)


def test_the_doctor_clears_the_model_and_finds_the_missing_mask(model):
    healthy, broken = diagnosis.diagnose_models(model)
    assert healthy.report.healthy
    assert healthy.finding.passed
    assert broken.report.diagnoses[0].id == "causal_leak"
    assert broken.finding.passed
    assert model.decoder.causal  # the mask was removed from a copy


def test_a_wrong_diagnosis_is_a_failure(model, monkeypatch):
    leak = Diagnosis("causal_leak", "causal mask leak", {}, (), "mask it")
    broken, healthy = Report("x", "decoder", (leak,), ()), Report("x", "decoder", (), ())
    for answer, verdicts in ((broken, [False, True]), (healthy, [True, False])):
        monkeypatch.setattr(diagnosis, "diagnose", lambda *_, answer=answer, **__: answer)
        assert [one.finding.passed for one in diagnosis.diagnose_models(model)] == verdicts
