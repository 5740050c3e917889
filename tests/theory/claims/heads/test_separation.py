"""One head against two."""

import sys

import pytest
import torch

from glassformer.finding import Verdict
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.heads.separation import FIRST, SECOND, difference, separation
from glassformer.theory.claims.registry import check
from glassformer.theory.claims.weights.layer import normal


@pytest.mark.parametrize("gap", [4.0, 8.0, 16.0])
def test_the_error_falls_as_the_exponential_of_the_gap(gap):
    x = normal(torch.Generator().manual_seed(0), 6, 4)
    wanted = x[FIRST] - x[SECOND]
    near, nearer = (float((difference(x, g)["out"] - wanted).norm()) for g in (gap, gap + 1))
    assert near / nearer == pytest.approx(2.718, rel=0.1)


def test_every_query_gets_the_difference():
    x = normal(torch.Generator().manual_seed(1), 6, 4)
    out = difference(x, 40.0)["out"]
    torch.testing.assert_close(out, (x[FIRST] - x[SECOND]).expand(6, 4), atol=1e-14, rtol=0)


def test_without_z3_the_argument_by_signs_remains(monkeypatch):
    monkeypatch.setitem(sys.modules, "z3", None)
    found = check("multihead-separation")
    assert found.verdict is Verdict.PASS
    assert "not examined: one head cannot" in found.why


def test_all_head_counts_cost_the_same():
    cost = next(f for f in separation(Lab()) if f.id == "cost")
    assert cost.evidence["parameters"] == {1: 1024, 2: 1024, 4: 1024, 8: 1024}
