"""Softmax in a narrower dtype than the model is found; half-precision models and autocast are not."""

import pytest
import torch

from glassformer.doctor.probes import subject_of
from glassformer.doctor.probes.structure.precision import softmax_in_own_dtype
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.finding import Verdict
from tests.bugs.styles import nano
from tests.doctor.probes.structure.cases import SOUND, bugs_of, styled


@pytest.mark.parametrize(("style", "bug"), bugs_of("low_precision"))
def test_half_precision_softmax_is_found(style, bug):
    finding = softmax_in_own_dtype(*styled(style, bug))
    assert finding.verdict is Verdict.FAIL
    assert finding.evidence["dtype"] in ("float16", "bfloat16")


@pytest.mark.parametrize("style", SOUND)
def test_softmax_in_the_models_dtype_passes(style):
    assert softmax_in_own_dtype(*styled(style)).verdict is Verdict.PASS


def test_a_model_in_bfloat16_is_not_judged():
    subject = subject_of(nano.build().bfloat16(), kind="decoder")
    assert softmax_in_own_dtype(subject, recorded(subject)).verdict is Verdict.SKIP


class Autocast(nano.GPT):
    def forward(self, idx, targets=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(idx, targets)


def test_autocast_inside_the_model_is_mixed_precision_and_not_a_bug():
    subject = subject_of(Autocast(nano.build().config).eval(), kind="decoder")
    recording = recorded(subject)
    assert any(n.value.dtype is torch.bfloat16 for n in recording.graph.nodes)
    assert softmax_in_own_dtype(subject, recording).verdict is Verdict.PASS
