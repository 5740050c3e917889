"""Positions that are added twice are found; two different kinds of positions, and those of q and k alone, are not."""

import unittest.mock

import pytest
import torch

from glassformer.doctor.probes import subject_of
from glassformer.doctor.probes.structure.additions import positions_added_once
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.finding import Verdict
from tests.bugs.styles import functional
from tests.doctor.probes.structure.cases import bugs_of, styled
from tests.doctor.probes.subjects import t5


@pytest.mark.parametrize(("style", "bug"), bugs_of("position_twice"))
def test_positions_added_twice_are_found(style, bug):
    finding = positions_added_once(*styled(style, bug))
    assert finding.verdict is Verdict.FAIL
    assert finding.measured == 2


@pytest.mark.parametrize("style", ["nano", "functional", "contracted", "encoder", "pair"])
def test_positions_added_once_pass(style):
    assert positions_added_once(*styled(style)).verdict is Verdict.PASS


def test_relative_positions_are_not_added_and_not_judged():
    assert positions_added_once(*styled("hugging")).verdict is Verdict.SKIP
    assert positions_added_once(t5(), recorded(t5())).verdict is Verdict.SKIP


class TwoKinds(functional.Functional):
    """Sinusoids, and other sinusoids: nothing is there twice."""

    def forward(self, idx):
        with unittest.mock.patch.object(functional.F, "embedding", self.placed):
            return super().forward(idx)

    def placed(self, idx, table):
        return table[idx] + self.waves[: idx.shape[1]].roll(1, -1)


def test_two_kinds_of_positions_are_a_design():
    subject = subject_of(TwoKinds(functional.build().config).eval(), kind="decoder")
    assert positions_added_once(subject, recorded(subject)).verdict is not Verdict.FAIL


class QueriesAndKeys(functional.Functional):
    def forward(self, idx):
        p, T = self.p, idx.shape[1]
        x = torch.nn.functional.embedding(idx, p["embed"]) + self.waves[:T]
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        for i in range(self.config.n_layers):
            placed = x + self.waves[:T]  # read by attention, and not added to the stream
            x = x + functional.attention(p, i, placed, mask, self.config.n_heads, None)
            x = x + functional.feed(p, i, x)
        return torch.nn.functional.linear(x, p["head"])


def test_positions_that_only_attention_reads_are_a_design():
    model = QueriesAndKeys(functional.build().config).eval()
    subject = subject_of(model, kind="decoder")
    assert positions_added_once(subject, recorded(subject)).verdict is Verdict.PASS
