"""Every parameter gets a gradient, with its excuses."""

import pytest
import torch.nn.functional as F

from glassformer.doctor.probes import gradients
from glassformer.finding import Verdict
from tests.bugs import healthy_traps as traps
from tests.doctor.probes.subjects import BUGS, bert, buggy, failures, gpt2, rotary, t5, warmed


@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_are_reached_everywhere(make):
    *notes, finding = gradients.reach_every_parameter(make())
    assert finding.verdict is Verdict.PASS, finding.text()
    assert all(note.evidence["explained"] for note in notes)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "id", ["attention_detached", "mlp_times_zero", "scores_detached", "position_never_added", "final_norm_skipped"]
)
def test_what_gets_none_is_named_by_its_cause(id):
    (finding,) = gradients.reach_every_parameter(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.split("/")[0] == BUGS[id].diagnosis
    assert BUGS[id].layer in (None, finding.evidence["layer"])


def test_key_biases_are_excused_and_query_biases_are_not():
    assert gradients._excused("layer.0.attention.self.key.bias")
    assert gradients._excused("decoder.blocks.0.attention.k.bias")
    assert not gradients._excused("layer.0.attention.self.query.bias")
    assert not gradients._excused("blocks.0.mlp.bias")


def test_values_read_from_keys_leave_a_projection_unused():
    (finding,) = gradients.reach_every_parameter(buggy("values_are_keys"))
    assert (finding.verdict, finding.id) == (Verdict.FAIL, "dead_gradient/flow")
    assert "in layer 1 the values are the keys" in finding.why
    assert "own projection" in finding.remedy


def test_an_unused_third_of_a_fused_projection_is_found():
    class KeysTwice(traps.NanoAttention):
        def forward(self, x):
            q, k, _ = (part.unflatten(-1, (traps.H, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, k, is_causal=True)
            return self.c_proj(y.transpose(1, 2).flatten(2))

    model = traps.nano_style()
    assert failures(gradients.reach_every_parameter(warmed(model, kind="decoder"))) == []
    model.transformer["h"][1].attn.__class__ = KeysTwice
    (finding,) = gradients.reach_every_parameter(warmed(model, kind="decoder"))
    assert (finding.verdict, finding.id) == (Verdict.FAIL, "dead_gradient/fused")
    assert (finding.evidence["rows"], finding.evidence["layer"]) == ([96, 143], 1)
    assert "the values are the keys" in finding.why


def test_keys_and_values_shared_by_design_leave_nothing_unused():
    assert failures(gradients.reach_every_parameter(warmed(traps.shared_key_value()))) == []
