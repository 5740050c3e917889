"""Every probe is made in its order, and none can stop the others."""

import pytest

from glassformer.doctor.examine import FAMILIES, QUICK, Examination, guard, run, steps, warmth
from glassformer.doctor.probes import CannotExamineError, Unsupported, gradients, subject_of, weighting
from glassformer.finding import Finding, Verdict
from tests.bugs.healthy import WARD
from tests.doctor.probes.subjects import Copycat, buggy, gpt2, warmed


def test_a_probe_that_breaks_becomes_a_skip_with_its_reason():
    def broken(subject):
        yield Finding("a/b", Verdict.PASS)
        raise ZeroDivisionError("inside the model")

    def lacking(subject):
        raise Unsupported("it has no cache")

    def leaving(subject):
        raise SystemExit(3)

    found = list(guard("family/probe", broken, gpt2()))
    assert [f.verdict for f in found] == [Verdict.PASS, Verdict.SKIP]
    assert "inside the model" in found[1].why
    assert next(guard("family/probe", lacking, gpt2())).why == "it has no cache"
    assert next(guard("family/probe", leaving, gpt2())).why == "it stopped with SystemExit: 3"


@pytest.mark.parametrize("quick", [False, True])
def test_attention_weights_and_unused_projections_are_probed(quick):
    """A second softmax, squared weights and values read from keys were once called healthy."""
    made = {probe for _, inner in steps(Examination(subject_of(Copycat()), quick=quick)) for _, probe in inner}
    assert weighting.used_as_they_are in made
    assert quick or gradients.reach_every_parameter in made


def test_the_time_limit_is_not_swallowed():
    def slow(subject):
        raise CannotExamineError("the examination took more than 1 s")

    with pytest.raises(CannotExamineError):
        list(guard("family/probe", slow, gpt2()))


def test_uniform_attention_is_warmed_and_sharp_attention_is_not():
    assert warmth(gpt2()) == 6.0
    sharp = next(h for h in WARD if h.id == "odd-sharp-attention")
    assert warmth(warmed(sharp.build())) == 1.0


def test_a_model_that_drops_in_eval_is_muted_and_examined_further():
    subject = buggy("drops_in_eval")
    exam = Examination(subject, quick=True)
    run(exam)
    assert subject.mute
    assert {f.id for f in exam.findings if f.verdict is Verdict.FAIL} == {"eval_stochastic/dropout"}


def test_each_finding_is_reported_as_it_is_made_with_its_family():
    seen, asked = [], []

    def found(finding, family):
        seen.append((finding, family, len(asked)))
        print("heard")

    exam = Examination(subject_of(Copycat()), quick=True, found=found)
    run(exam, lambda what, done, of: asked.append(what))
    assert [finding for finding, _, _ in seen] == exam.findings
    assert list(dict.fromkeys(family for _, family, _ in seen)) == [n for n in FAMILIES if n in QUICK]
    # reported between the probes, not at the end
    assert len({when for _, _, when in seen}) > 8


def test_what_the_listener_raises_ends_the_examination():
    def found(finding, family):
        raise InterruptedError(family)

    with pytest.raises(InterruptedError, match="modes"):
        run(Examination(gpt2(), quick=True, found=found))


def test_quick_makes_fewer_probes_and_encoders_need_not_be_causal():
    quick, full = steps(Examination(gpt2(), quick=True)), steps(Examination(gpt2()))
    assert sum(len(inner) for _, inner in quick) < sum(len(inner) for _, inner in full)
    named = {name: {step for step, _ in inner} for name, inner in full}
    assert all(set(wanted) <= named[family] for family, wanted in QUICK.items())
    assert dict(steps(Examination(buggy("over_mask_causal_encoder"))))["causality"] == []
