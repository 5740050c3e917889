"""Ids that the loss leaves out are found and named; padding that is declared is not one of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glassformer.doctor.probes.structure.targets import every_id_counts, must_count, padding_labels
from glassformer.finding import Verdict
from tests.bugs.styles import encoder
from tests.bugs.styles.variants import VARIANTS
from tests.doctor.probes.structure.cases import SOUND, styled
from tests.doctor.probes.subjects import buggy, failures, listed, sound, warmed

LEFT_OUT = {"nano": [5], "hugging": [2], "functional": [3], "contracted": [7], "legacy_cache": [2]}
IDS = [
    (v.style, v.bug)
    for v in VARIANTS
    if v.diagnosis == "loss_padding" and v.style in LEFT_OUT and v.bug != "padding_labels"
]


@pytest.mark.parametrize(("style", "bug"), IDS)
def test_ids_that_do_not_count_are_named(style, bug):
    (finding,) = every_id_counts(styled(style, bug)[0])
    assert finding.verdict is Verdict.FAIL
    wanted = {"zero_masked": [0], "several_masked": [0, 1, 2, 3]}.get(bug, LEFT_OUT[style])
    assert finding.evidence["ids"] == wanted


@pytest.mark.parametrize("style", SOUND)
def test_losses_that_count_every_id_pass(style):
    (finding,) = every_id_counts(styled(style)[0])
    assert finding.passed


def test_padding_may_be_left_out_unless_it_ends_a_text():
    subject = styled("nano", "eos_masked", pad_token_id=5, eos_token_id=5)[0]
    assert failures(every_id_counts(subject)) == ["loss_padding/ids"]
    subject = styled("nano", "eos_masked", pad_token_id=5, eos_token_id=None)[0]
    subject.model.config.eos_token_id = 5  # the code reads it; the declaration does not have it
    assert failures(every_id_counts(subject)) == []


def test_large_vocabularies_are_tried_at_their_special_ids():
    subject = styled("nano")[0]
    subject.facts.raw["eos_token_id"] = [5, 60]
    subject.vocab_size = 5000
    ids = must_count(subject)
    assert len(ids) < 60
    assert {0, 5, 60, 4999} <= set(ids)


def test_labels_at_padding():
    subject, _ = styled("encoder", "padding_labels")
    assert padding_labels(subject).verdict is Verdict.FAIL
    assert padding_labels(styled("encoder")[0]).passed
    assert failures([padding_labels(buggy("padding_labels"))]) == ["loss_padding/pad-labels"]
    assert padding_labels(sound("padding_labels")).passed


def test_labels_of_the_forward_pass_are_the_callers():
    subject = warmed(encoder.labels_in_forward(), kind="encoder")
    assert padding_labels(subject).verdict is Verdict.SKIP
    assert listed(every_id_counts(subject))[0].passed


class Sure(nn.Module):
    """An encoder that predicts what it reads with a probability of 1, as trained ones do; `skipped` does not count."""

    def __init__(self, skipped=None):
        super().__init__()
        self.table, self.skipped = nn.Embedding.from_pretrained(60 * torch.eye(31), freeze=False), skipped

    def forward(self, input_ids, labels=None):
        logits = self.table(input_ids) + 0 * self.table.weight.sum()
        if labels is None:
            return {"logits": logits}
        labels = labels if self.skipped is None else labels.masked_fill(labels == self.skipped, -100)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_targets_that_a_model_is_sure_of_are_not_taken_for_uncounted():
    assert listed(every_id_counts(warmed(Sure(), kind="encoder")))[0].passed
    (finding,) = every_id_counts(warmed(Sure(skipped=7), kind="encoder"))
    assert finding.evidence["ids"] == [7]
