"""The reported loss against our own cross-entropy, by value and by gradient."""

import pytest
import torch
import torch.nn.functional as F

from glassformer.doctor.probes import training
from glassformer.finding import Verdict
from tests.bugs import healthy_transformers
from tests.bugs.healthy_traps import nano_style
from tests.doctor.probes.subjects import BUGS, Copycat, buggy, failures, gpt2, listed, names, sound, warmed


def test_a_model_without_a_loss_is_not_judged():
    assert {f.verdict for f in listed(training.label_shift(gpt2()))} == {Verdict.SKIP}


@pytest.mark.parametrize("id", ["labels_not_shifted", "target_shifted_twice"])
def test_correct_losses_pass(id):
    assert failures(training.label_shift(sound(id))) == []


@pytest.mark.parametrize(
    "id", ["labels_not_shifted", "labels_shifted_twice", "labels_shifted_flat", "target_shifted_twice"]
)
def test_other_shifts_are_named(id):
    assert failures(training.label_shift(buggy(id))) == ["label_shift/gradient"]


@pytest.mark.parametrize("id", ["padding_counted", "mean_of_means", "zero_ignored", "divided_by_all"])
def test_other_targets_are_found(id):
    assert names(training.label_shift(buggy(id))) == {BUGS[id].diagnosis}


def test_micro_batches_weighted_by_their_targets_give_the_large_batch():
    """The mean of means is found by accumulation itself, and distinguished from the shift, which is correct."""
    findings = {f.id: f for f in listed(training.label_shift(buggy("mean_of_means")))}
    assert findings["label_shift/gradient"].passed
    assert findings["loss_padding/accumulation"].verdict is Verdict.FAIL
    for id in ("mean_of_means", "target_shifted_twice"):
        healthy = {f.id: f.verdict for f in listed(training.label_shift(sound(id)))}
        assert healthy["loss_padding/accumulation"] is Verdict.PASS


def test_an_id_that_never_counts_is_no_matter_of_the_shift():
    subject = sound("mean_of_means")

    class WithoutLast(type(subject.model)):
        def loss(self, idx, labels=None, attention_mask=None):
            labels = idx if labels is None else labels
            return super().loss(idx, labels.masked_fill(labels == self.config.vocab_size - 1, -100), attention_mask)

    subject.model.__class__ = WithoutLast
    findings = {f.id: f for f in listed(training.label_shift(subject))}
    assert findings["label_shift/gradient"].passed
    assert findings["loss_padding/every-id"].verdict is Verdict.FAIL


class AlignedLabels(type(sound("mean_of_means").model)):
    """Shifts when it is given tokens alone, and not when it is given labels."""

    def loss(self, idx, labels=None, attention_mask=None):
        if labels is None:
            return super().loss(idx, None, attention_mask)
        return F.cross_entropy(self(idx).flatten(0, 1), labels.flatten())


class ShiftedTwiceWithMask(type(sound("mean_of_means").model)):
    def loss(self, idx, labels=None, attention_mask=None):
        if attention_mask is None:
            return super().loss(idx, labels)
        return F.cross_entropy(self(idx)[:, :-2].flatten(0, 1), idx[:, 2:].flatten())


class Targets(type(sound("mean_of_means").model)):
    """`targets` may be meant for shifted ids."""

    def loss(self, idx, targets=None):
        return super().loss(idx) if targets is None else F.cross_entropy(self(idx).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("cls", "found"),
    [(AlignedLabels, ["label_shift/arguments"]), (ShiftedTwiceWithMask, ["label_shift/arguments"]), (Targets, [])],
)
def test_optional_arguments_do_not_change_the_shift(cls, found):
    subject = sound("mean_of_means")
    subject.model.__class__ = cls
    assert failures(training.label_shift(subject)) == found


def test_a_caller_who_shifts_is_right_too():
    findings = listed(training.label_shift(warmed(nano_style(), kind="decoder")))
    assert failures(findings) == []
    assert any("shift 0" in f.why for f in findings)


def test_own_loss_is_cross_entropy_at_a_shift():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = torch.nn.functional.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
    assert torch.isclose(training.own_loss(logits, labels, 2), expected)
    assert training.own_loss(logits, labels, 0) != training.rows_mixed(logits, labels)


@pytest.mark.parametrize(("drop", "words"), [("low ids", "(ids "), ("last", "of its targets")])
def test_targets_left_out_are_no_matter_of_the_shift(drop, words):
    subject = sound("mean_of_means")

    class Drops(type(subject.model)):
        def loss(self, idx, labels=None, attention_mask=None):
            labels = (idx if labels is None else labels).clone()
            if drop == "last":
                labels[:, -1] = -100
            return super().loss(
                idx, labels.masked_fill(labels < 20, -100) if drop == "low ids" else labels, attention_mask
            )

    subject.model.__class__ = Drops
    (finding, *_) = listed(training.label_shift(subject))
    assert finding.id == "loss_padding/targets"
    assert words in finding.why


class Shifts(Copycat):
    """A model whose loss compares logits at t with targets at t + `shift`."""

    shift = 0

    def answer(self, idx, targets):
        logits = super().forward(idx)
        if targets is None:
            return logits, None
        end = idx.shape[1] - self.shift
        return logits, F.cross_entropy(logits[:, :end].flatten(0, 1), targets[:, self.shift :].flatten())


class Targets(Shifts):
    def forward(self, idx, targets=None, past_key_values=None):
        return self.answer(idx, targets)


class Labels(Shifts):
    def forward(self, idx, attention_mask=None, past_key_values=None, labels=None, return_dict=None):
        return self.answer(idx, labels)


class Target(Shifts):
    def forward(self, idx, target=None):
        return self.answer(idx, target)


class Method(Shifts):
    def forward(self, idx, past_key_values=None):
        return self.answer(idx, None)[0]

    def loss(self, idx, targets):
        return self.answer(idx, targets)[1]


@pytest.mark.parametrize("made", [Targets, Labels, Target, Method])
def test_no_argument_name_decides_who_shifts_the_labels(made):
    for shift, expected in ((0, []), (1, []), (2, ["label_shift/gradient"])):
        model = made()
        model.shift = shift
        found = listed(training.label_shift(warmed(model)))
        assert next(f for f in found if f.id == "label_shift/gradient").verdict is not Verdict.SKIP
        assert failures(found) == expected


def test_a_class_of_the_library_shifts_inside():
    """Its documentation says so, and its trainer relies on it."""
    model = healthy_transformers.build(healthy_transformers.DECODERS["gpt2"])
    assert failures(training.label_shift(warmed(model))) == []
    model.loss_function = lambda logits, labels, vocab_size, **also: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    )
    assert failures(training.label_shift(warmed(model))) == ["label_shift/gradient"]
