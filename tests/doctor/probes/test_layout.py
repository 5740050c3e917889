"""Splitting and merging heads: recognised by numbers, whatever the layout."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import attention, layout
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Verdict
from tests.bugs.styles import time_first
from tests.doctor.probes.subjects import BUGS, bert, buggy, gpt2, rotary, t5


def finding_of(subject):
    return layout.head_layout(subject, attention.traced(subject))


@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_keep_tokens_together(make):
    assert finding_of(make()).verdict is Verdict.PASS


@pytest.mark.parametrize("id", ["merge_without_transpose", "split_without_transpose"])
def test_missing_transposes_are_named_with_their_layer(id):
    finding = finding_of(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert finding.evidence["where"] == ("merged" if "merge" in id else "split")
    if BUGS[id].layer is not None:
        assert finding.evidence["layer"] == BUGS[id].layer


@pytest.mark.parametrize(
    ("bug", "where"), [("merged_untransposed", "merged"), ("split_batch_first", "split"), (None, None)]
)
def test_time_may_be_first(bug, where):
    assert finding_of(subject_of(time_first.build(bug))).evidence.get("where") == where


@pytest.mark.parametrize("make", [gpt2, rotary, t5])
def test_as_many_tokens_as_a_head_is_wide(make):
    subject = make()
    seen = attention.traced(subject)
    assert layout.head_layout(subject, seen, length=seen[0].attention.q.shape[-1]).verdict is Verdict.PASS


def test_a_leak_through_the_mask_is_no_matter_of_layout():
    assert finding_of(buggy("no_causal_mask")).verdict is not Verdict.FAIL


class Grouped(nn.Module):
    """Queries that share keys, in one einsum: no axis of the product is the heads'. `fault` says what is wrong."""

    def __init__(self, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(29, 24), nn.Linear(24, 29)
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.fault = fault

    def forward(self, idx):
        x = self.table(idx)
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 2, 2, 6)
        k, v = self.kv(x).view(b, t, 4, 6).chunk(2, 2)
        if self.fault == "split":
            q = self.q(x).view(b, 2, 2, t, 6).permute(0, 3, 1, 2, 4)
        if self.fault.startswith("time"):
            scores = torch.einsum("btgrk,bsgk->tbgrs", q, k) * 6**-0.5
            later = torch.ones(t, t).triu(1).bool()[:, None, None, None]
            heads = torch.einsum("tbgrs,bsgk->tbgrk", scores.masked_fill(later, -torch.inf).softmax(-1), v)
            heads = heads if self.fault == "time merged" else heads.transpose(0, 1)
            return self.head(x + self.o(heads.reshape(b, t, -1)))
        scores = torch.einsum("btgrk,bsgk->bgrts", q, k) * 6**-0.5
        weights = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
        end = "bgrtk" if self.fault == "merged" else "btgrk"
        return self.head(x + self.o(torch.einsum(f"bgrts,bsgk->{end}", weights, v).reshape(b, t, -1)))


@pytest.mark.parametrize("fault", ["", "split", "merged", "time", "time merged"])
def test_grouped_heads_of_an_einsum_are_judged_too(fault):
    finding = finding_of(subject_of(Grouped(fault), kind="decoder"))
    assert finding.verdict is (Verdict.PASS if fault in ("", "time") else Verdict.FAIL), finding.text()
    assert finding.evidence.get("where", "") == fault.removeprefix("time").strip()


def test_heads_that_are_rounded_before_they_are_merged_are_the_same_heads():
    (one, *_) = attention.traced(bert())
    merged = one.attention.merged.to(torch.bfloat16)
    rounded = replace(one, attention=replace(one.attention, merged=merged))
    assert layout._merge_mixes(rounded, 2) is False
