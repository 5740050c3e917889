"""Probes share a copy and its answers, and nothing that one of them does is seen by another."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from glassformer.doctor.examine import Examination, run
from glassformer.doctor.probes import subject_of
from glassformer.doctor.subject import copies
from glassformer.doctor.subject.isolate import AllDouble, NoDropout
from glassformer.doctor.subject.trace import trace_call
from tests.doctor.probes.subjects import Copycat, buggy, gpt2, t5


class Counting(Copycat):
    """Counts its calls in a list that all copies share."""

    calls: ClassVar[list[int]] = []

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return super().forward(*args, **kwargs)


@pytest.fixture
def counted():
    subject = subject_of(Counting())
    subject.repeats = True
    Counting.calls.clear()
    return subject


def test_a_copy_is_used_again_as_it_was():
    subject = subject_of(Copycat())
    with subject.isolated(6.0, train=True) as one:
        first = one.model
        first.note, first.head.kept = 1, [2]
        first.register_forward_hook(lambda *_: None)
        first.table.weight.grad = torch.ones_like(first.table.weight)
    with subject.isolated(6.0) as two:
        assert two.model is first
        assert not hasattr(first, "note")
        assert not hasattr(first.head, "kept")
        assert not first.training
        assert not first._forward_hooks
        assert first.table.weight.grad is None
    with subject.isolated() as other:
        assert other.model is not first
    assert subject.copies.spoiled == 0


def test_who_asks_meanwhile_or_for_a_copy_of_its_own_gets_another_one():
    subject = subject_of(Copycat())
    with subject.isolated() as one, subject.isolated() as two:
        assert one.model is not two.model
    with subject.isolated() as shared:
        pass
    with subject.isolated(own=True) as own:
        assert own.model is not shared.model
        own.model.table.weight.zero_()
    with subject.isolated() as again:
        assert again.model is shared.model
    subject.copies.sharing = False
    with subject.isolated() as new:
        assert new.model is not shared.model


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.table.weight.mul_(2),
        lambda model: model.table.weight.data.mul_(2),
        lambda model: model.to(torch.bfloat16).to(torch.float32),
        lambda model: model.table.weight.requires_grad_(False),
    ],
)
def test_a_copy_that_was_written_to_is_not_used_again(write):
    subject = subject_of(Copycat())
    with subject.isolated() as one:
        write(one.model)
    with subject.isolated() as two:
        assert two.model is not one.model
        assert torch.equal(two.model.table.weight, subject.model.table.weight)
    assert subject.copies.spoiled == 1


def test_a_change_of_the_model_itself_is_seen():
    subject = subject_of(Copycat())
    with subject.isolated():
        pass
    with torch.no_grad():
        subject.model.table.weight.mul_(2)
    with subject.isolated() as isolated:
        assert torch.equal(isolated.model.table.weight, subject.model.table.weight)


def test_the_same_call_is_made_once(counted):
    answers = []
    for _ in range(3):
        with counted.isolated() as isolated:
            answers.append(isolated.logits(isolated.tokens(2, 7)))
    assert len(Counting.calls) == 1
    assert torch.equal(answers[0], answers[2])
    with counted.isolated() as isolated, NoDropout():
        isolated.logits(isolated.tokens(2, 8))
        isolated.logits(isolated.tokens(2, 7, seed=3))
        assert len(Counting.calls) == 3


def test_where_a_call_may_differ_it_is_made_again(counted):
    def made(isolated):
        before = len(Counting.calls)
        isolated.logits(isolated.tokens(2, 7))
        return len(Counting.calls) - before

    with counted.isolated() as isolated:
        assert (made(isolated), made(isolated)) == (1, 0)
        with torch.enable_grad():
            assert made(isolated) == 1
        with AllDouble():
            assert made(isolated) == 1
        handle = isolated.model.table.register_forward_hook(lambda *_: None)
        assert made(isolated) == 1
        handle.remove()
        isolated.model.head.train()
        assert made(isolated) == 1
        isolated.model.eval()
        assert made(isolated) == 0
        isolated.model.head.weight.mul_(2)
        assert (made(isolated), made(isolated)) == (1, 1)
    counted.repeats = False
    with counted.isolated() as isolated:
        assert (made(isolated), made(isolated)) == (1, 1)


def test_a_recorded_call_is_kept_too(counted):
    with counted.isolated() as isolated:
        tokens = isolated.tokens(2, 7)
        one, two = trace_call(isolated, tokens), trace_call(isolated, tokens)
        assert one is two
        assert trace_call(isolated, isolated.other(tokens)) is not one
    assert len(Counting.calls) == 2


def test_answers_and_copies_keep_to_their_limits(counted, monkeypatch):
    size = 2 * 7 * counted.vocab_size * 4
    monkeypatch.setattr(copies, "ANSWER_BYTES", 2 * size)
    with counted.isolated() as isolated:
        for seed in range(4):
            isolated.logits(isolated.tokens(2, 7, seed=seed))
        assert isolated.shared.answer_bytes == 2 * size
        isolated.logits(isolated.tokens(2, 7, seed=3))
        assert len(Counting.calls) == 4
        isolated.logits(isolated.tokens(2, 7, seed=0))
        assert len(Counting.calls) == 5
    monkeypatch.setattr(copies, "KEPT_BYTES", copies.n_bytes(counted.model))
    for factor in (2.0, 3.0):
        with counted.isolated(factor):
            pass
    assert list(counted.copies.kept) == [(3.0, None)]


@pytest.mark.parametrize("make", [gpt2, pytest.param(t5, marks=pytest.mark.slow)])
def test_no_probe_writes_to_a_copy_that_others_use(make):
    subject = replace(make(), copies=copies.Copies())
    exam = run(Examination(subject))
    assert subject.repeats
    assert len(exam.findings) > 20
    assert subject.copies.spoiled == 0


class Mutable(nn.Module):
    """Keeps a call in a list and in a buffer, as a cache that is never emptied does."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = Copycat(), []
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.seen.append(tokens)
        self.calls = self.calls + 1
        return self.inner(tokens)


def test_what_a_model_keeps_of_a_call_is_gone_for_the_next_probe():
    subject = subject_of(Mutable(), vocab_size=7)
    with subject.isolated() as one:
        one.logits(one.tokens(2, 5))
        assert len(one.model.seen) == 1
        assert float(one.model.calls) == 1
    with subject.isolated() as two:
        assert two.model is one.model
        assert two.model.seen == []
        assert float(two.model.calls) == 0


def test_a_model_that_keeps_something_is_copied_for_each_probe():
    subject = buggy("shared_cache")
    run(Examination(subject, quick=True))
    assert not subject.repeats
    assert not subject.copies.sharing
