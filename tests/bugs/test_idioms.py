"""Ways of writing that other tests do not have: sound models raise no alarm, and planted bugs are named first."""

import pytest

import glassformer as gf
from glassformer.doctor.subject.adapt import subject_of
from tests.bugs.idioms import by_hand, designs, encoders, kept_caches, parameters, ring, shifted

pytestmark = pytest.mark.slow


def healthy(model) -> bool:
    report = gf.diagnose(model)
    assert report.healthy, report.text()
    return True


def first(model) -> str:
    report = gf.diagnose(model)
    return report.diagnoses[0].id if report.diagnoses else "healthy"


@pytest.mark.parametrize("shift", [shifted.left_of, shifted.skewed])
def test_a_relative_shift_is_no_mix_of_heads(shift):
    assert healthy(shifted.build(shift=shift))


@pytest.mark.parametrize("bug", shifted.BUGS)
def test_bugs_around_a_relative_shift(bug):
    assert first(shifted.build(bug)) == shifted.BUGS[bug]


@pytest.mark.parametrize("cls", [*encoders.CLEAR, *encoders.FAINT])
def test_an_encoder_is_one(cls):
    assert subject_of(encoders.build(cls)).kind == "encoder"
    assert healthy(encoders.build(cls))


@pytest.mark.parametrize("cls", encoders.CLEAR)
def test_a_declared_encoder_that_hides_the_future(cls):
    assert first(encoders.build(cls, causal=True)) == "over_mask"


@pytest.mark.parametrize("cls", [*encoders.FAINT, encoders.Undeclared])
def test_a_causal_model_with_arguments_of_encoders_is_a_decoder(cls):
    report = gf.diagnose(encoders.build(cls, causal=True))
    assert report.kind == "decoder"
    assert not report.diagnoses, report.text()
    # torch's own layers give NaN for a padded query that sees no key; learned positions are padded on the right
    assert any("mask_nan" in n for n in report.notes) == (cls is encoders.ByPaddingArgument), report.text()


@pytest.mark.parametrize("name", encoders.SPELLINGS[:2])
def test_a_decoder_of_encoder_layers_is_healthy_under_any_name(name):
    assert healthy(encoders.build(encoders.called(name, encoders.Undeclared), causal=True))


@pytest.mark.parametrize("cls", encoders.TWO_HINTS)
def test_an_encoder_with_two_hints_that_hides_the_future(cls):
    assert first(encoders.build(cls, causal=True)) == "over_mask"


@pytest.mark.parametrize("cls", kept_caches.MODELS)
def test_caches_that_the_model_keeps_are_examined(cls):
    report = gf.diagnose(kept_caches.build(cls))
    assert report.healthy, report.text()
    made = {f.id for f in report.findings if f.passed}
    assert {"cache_mask/prompt", "cache_mismatch/steps", "cache_mask/chunks"} <= made, report.text()


@pytest.mark.parametrize(("cls", "bug"), [(c, b) for c in kept_caches.MODELS for b in c.BUGS])
def test_bugs_of_caches_that_the_model_keeps(cls, bug):
    assert first(kept_caches.build(cls, bug)) == cls.BUGS[bug]


@pytest.mark.parametrize("softmax", by_hand.SOFTMAXES)
@pytest.mark.parametrize("adjacent", [False, True])
def test_a_softmax_that_is_written_out_is_seen(softmax, adjacent):
    report = gf.diagnose(by_hand.build(softmax=by_hand.SOFTMAXES[softmax], adjacent=adjacent))
    assert report.healthy, report.text()
    made = {f.id for f in report.findings if f.passed}
    assert {"attn_scale/ratio", "over_mask/pattern", "norm_eps/formula"} <= made, report.text()


@pytest.mark.parametrize("softmax", by_hand.SOFTMAXES)
@pytest.mark.parametrize("bug", by_hand.BUGS)
def test_bugs_with_a_softmax_that_is_written_out(bug, softmax):
    adjacent = softmax in ("by_largest", "by_log_softmax")
    assert first(by_hand.build(bug, by_hand.SOFTMAXES[softmax], adjacent)) == by_hand.BUGS[bug]


@pytest.mark.parametrize("scores", parameters.ORDERS)
def test_a_model_of_parameters_is_examined(scores):
    report = gf.diagnose(parameters.build(scores=scores))
    assert report.healthy, report.text()
    made = {f.id for f in report.findings if f.passed}
    assert {"attn_scale/ratio", "attention_weights/after-softmax"} <= made, report.text()


@pytest.mark.parametrize("scores", parameters.ORDERS)
@pytest.mark.parametrize("bug", parameters.BUGS)
def test_bugs_of_a_model_of_parameters(bug, scores):
    assert first(parameters.build(bug, scores)) == parameters.BUGS[bug]


def test_a_ring_of_slots_is_a_cache():
    report = gf.diagnose(ring.build())
    assert report.healthy, report.text()
    assert {"cache_mask/prompt", "cache_mismatch/steps", "cache_mask/chunks"} <= {
        f.id for f in report.findings if f.passed
    }


@pytest.mark.parametrize("bug", ring.BUGS)
def test_a_wrong_ring_is_no_matter_of_the_mask(bug):
    assert first(ring.build(bug)) in ring.BUGS[bug]


@pytest.mark.parametrize("cls", designs.MODELS)
def test_recent_designs_raise_no_alarm(cls):
    assert healthy(designs.build(cls))
