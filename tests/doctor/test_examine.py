"""Every probe is made in its order, and none can stop the others."""

import pytest

from glassformer.checks import CannotExamineError, Unsupported
from glassformer.doctor.examine import Examination, guard, run, steps, warmth
from glassformer.finding import Finding, Verdict
from tests.bugs.healthy import WARD
from tests.checks.patients import gpt2, sick, warmed


def test_a_probe_that_breaks_becomes_a_skip_with_its_reason():
    def broken(subject):
        yield Finding("a/b", Verdict.PASS)
        raise ZeroDivisionError("inside the model")

    def lacking(subject):
        raise Unsupported("it has no cache")

    found = guard("family/probe", broken, gpt2())
    assert [f.verdict for f in found] == [Verdict.PASS, Verdict.SKIP]
    assert "inside the model" in found[1].why
    assert guard("family/probe", lacking, gpt2())[0].why == "it has no cache"


def test_the_time_limit_is_not_swallowed():
    def slow(subject):
        raise CannotExamineError("the examination took more than 1 s")

    with pytest.raises(CannotExamineError):
        guard("family/probe", slow, gpt2())


def test_uniform_attention_is_warmed_and_sharp_attention_is_not():
    assert warmth(gpt2()) == 6.0
    sharp = next(h for h in WARD if h.id == "odd-sharp-attention")
    assert warmth(warmed(sharp.build())) == 1.0


def test_a_model_that_drops_in_eval_is_muted_and_examined_further():
    subject = sick("drops_in_eval")
    exam = Examination(subject, quick=True)
    run(exam)
    assert subject.mute
    assert {f.id for f in exam.findings if f.verdict is Verdict.FAIL} == {"eval_stochastic/dropout"}


def test_quick_makes_fewer_probes_and_encoders_need_not_be_causal():
    quick, full = steps(Examination(gpt2(), quick=True)), steps(Examination(gpt2()))
    assert len(quick) < len(full)
    assert dict(steps(Examination(sick("over_mask_causal_encoder"))))["causality"] == []
