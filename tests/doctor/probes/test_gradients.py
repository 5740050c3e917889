"""Every parameter gets a gradient, with its excuses."""

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import gradients
from glassformer.finding import Verdict
from tests.doctor.probes.patients import BUGS, bert, gpt2, rotary, sick, t5


@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_are_reached_everywhere(make):
    (finding,) = gradients.reach_every_parameter(make())
    assert finding.verdict is Verdict.PASS, finding.text()


@pytest.mark.parametrize(
    "id", ["attention_detached", "mlp_times_zero", "scores_detached", "position_never_added", "final_norm_skipped"]
)
def test_what_gets_none_is_named_by_its_cause(id):
    (finding,) = gradients.reach_every_parameter(sick(id))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.split("/")[0] == BUGS[id].diagnosis
    assert BUGS[id].layer in (None, finding.evidence["layer"])


def test_key_biases_are_excused_and_query_biases_are_not():
    p = nn.Parameter(torch.zeros(3))
    assert gradients._excused("layer.0.attention.self.key.bias", p)
    assert gradients._excused("decoder.blocks.0.attention.k.bias", p)
    assert not gradients._excused("layer.0.attention.self.query.bias", p)
    assert not gradients._excused("blocks.0.mlp.bias", p)
