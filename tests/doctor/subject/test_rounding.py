"""Rounding shrinks in float64, a bug does not; fresh weights are warmed."""

import math

import torch
from torch import nn

from glassformer.doctor.subject.measure import gap
from glassformer.doctor.subject.rounding import Measured, first_over, judge, prefix_noise, worst
from tests.doctor.probes.subjects import gpt2, warmed


class Noisy(nn.Module):
    """Adds `ulps` of its own precision, or a fixed error, to the second row of a batch."""

    def __init__(self, fixed: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fixed = nn.Embedding(17, 17), fixed

    def forward(self, idx):
        x = self.table(idx)
        if len(idx) > 1:
            x = x + 4 * torch.finfo(x.dtype).eps * x.abs().max() + self.fixed
        return x


def measured(isolated):
    tokens = isolated.tokens(1, 4)
    alone, both = isolated.logits(tokens), isolated.logits(tokens.expand(2, -1))
    return Measured(gap(alone, both[:1]), 1e-9, "the same row")


def test_a_difference_that_shrinks_with_precision_is_rounding():
    finding = judge(warmed(Noisy()), "x/y", measured, "fix it")
    assert finding.passed
    assert finding.evidence["rounding"] > 1e-9


def test_a_difference_that_stays_is_a_bug_and_says_so_in_float64():
    finding = judge(warmed(Noisy(1e-4)), "x/y", measured, "fix it")
    assert not finding.passed
    assert math.isclose(finding.evidence["float64"], 1e-4, rel_tol=1e-3)
    assert finding.remedy == "fix it"


def test_the_second_look_is_with_warm_weights():
    seen = []

    def look(isolated):
        seen.append(float(isolated.model.table.weight.std()))
        return Measured(0.0, 1.0, "")

    judge(warmed(Noisy()), "x/y", look, "")
    assert math.isclose(seen[1], 6 * seen[0], rel_tol=1e-5)


def test_prefix_noise_of_a_correct_model_is_rounding():
    with gpt2().isolated(6.0) as isolated:
        tokens = isolated.tokens(2, 20)
        assert prefix_noise(isolated, tokens) < 1e-4 * float(isolated.logits(tokens).std())


def test_the_first_over_its_bound_goes_before_the_worst():
    fine, over, far = Measured(1, 2, ""), Measured(3, 2, ""), Measured(9, 2, "")
    assert first_over([fine, over, far]) is over
    assert worst([fine, over, far]) is far
    assert Measured(math.nan, 1, "").ratio == math.inf


def test_what_asks_for_float32_by_name_is_computed_in_float64():
    class Angles(Noisy):
        def forward(self, idx):
            inverse = torch.full((1, 17), 1.1, dtype=torch.float32)
            angles = (torch.arange(idx.shape[1]).float()[:, None] + 1000.0 * (len(idx) - 1)) * inverse
            return self.table(idx) + (angles - 1000.0 * (len(idx) - 1) * inverse).to(self.table.weight.dtype)

    finding = judge(warmed(Angles()), "x/y", measured, "fix it")
    assert finding.passed
    assert finding.evidence["rounding"] > 1e-6


def test_half_precision_is_judged_by_float64_too():
    class Sharp(Noisy):
        """Off by tenths in bfloat16, and exact in float64."""

        def forward(self, idx):
            x = 30 * self.table(idx)
            return x + 8 * torch.finfo(x.dtype).eps * x.abs().max() if len(idx) > 1 else x

    assert judge(warmed(Sharp().bfloat16()), "x/y", measured, "fix it").passed
    assert not judge(warmed(Noisy(0.5).bfloat16()), "x/y", measured, "fix it").passed
