"""Layers that share weights or run twice are found in every style; declared sharing and loops are not judged."""

import copy

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import subject_of
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.doctor.probes.structure.reuse import declared_sharing, weights_of_its_own
from glassformer.finding import Verdict
from tests.bugs.styles import nano
from tests.doctor.probes.structure.cases import SOUND, bugs_of, styled


@pytest.mark.sample(8)
@pytest.mark.parametrize(("style", "bug"), bugs_of("layer_reuse"))
def test_reused_layers_are_found(style, bug):
    finding = weights_of_its_own(*styled(style, bug))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.startswith("layer_reuse/")


@pytest.mark.parametrize("style", SOUND)
def test_layers_of_their_own_pass(style):
    assert weights_of_its_own(*styled(style)).verdict is Verdict.PASS


def test_the_layer_is_named():
    assert weights_of_its_own(*styled("nano", "mlp_shared")).evidence["layer"] == 2
    assert weights_of_its_own(*styled("hugging", "layer_twice")).evidence["layer"] == 1


@pytest.mark.parametrize("declared", [{"share_layers": True}, {"n_loops": 2}, {"num_hidden_groups": 2}])
def test_declared_sharing_is_a_design(declared):
    finding = weights_of_its_own(*styled("nano", "layers_multiplied", **declared))
    assert finding.verdict is Verdict.SKIP
    assert finding.evidence["explained"]


@pytest.mark.parametrize("other", [{"share_embeddings": True}, {"n_shared_experts": 2}, {"n_loops": 1}])
def test_other_sharing_declares_nothing_about_layers(other):
    assert declared_sharing(other) is None
    assert weights_of_its_own(*styled("nano", "layers_multiplied", **other)).verdict is Verdict.FAIL


class Universal(nano.GPT):
    """One block in a loop, in no list."""

    def __init__(self, config):
        super().__init__(config)
        self.block = self.transformer["h"][0]
        self.transformer["h"] = nn.ModuleList()

    def forward(self, idx, targets=None):
        pos = self.transformer["wpe"](torch.arange(idx.shape[1]))
        x = self.transformer["wte"](idx) + pos
        for _ in range(self.config.n_layer):
            x = self.block(x)
        return self.lm_head(self.transformer["ln_f"](x)), None


def examined(model):
    subject = subject_of(model, kind="decoder")
    return weights_of_its_own(subject, recorded(subject))


def test_a_loop_over_one_layer_and_a_list_run_up_to_the_declared_depth_are_designs():
    assert examined(Universal(nano.build().config).eval()).verdict is Verdict.SKIP
    assert examined(nano.build("stack_twice", n_layer=6)).verdict is Verdict.FAIL
    model = nano.build("stack_twice")
    model.config.n_layer = 6
    assert examined(model).verdict is Verdict.SKIP


def test_shallow_copies_share_their_weights_and_deep_ones_do_not():
    model = nano.build()
    model.transformer["h"][1] = copy.copy(model.transformer["h"][0])
    assert examined(model).verdict is Verdict.FAIL
    model.transformer["h"][1] = copy.deepcopy(model.transformer["h"][0])
    assert examined(model).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("bug", "verdict"),
    [("layers_multiplied", Verdict.FAIL), ("layer_twice", Verdict.FAIL), ("stack_twice", Verdict.SKIP)],
)
def test_without_a_declared_number_of_layers_the_list_declares_it_unless_all_of_it_runs_again(bug, verdict):
    subject, recording = styled("nano", bug)
    subject.facts.facts.pop("n_layers")
    assert weights_of_its_own(subject, recording).verdict is verdict


def test_an_attribute_of_the_model_declares_sharing_too():
    subject, recording = styled("nano", "layers_multiplied")
    subject.module.share_layers = True
    assert weights_of_its_own(subject, recording).verdict is Verdict.SKIP
