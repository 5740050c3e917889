"""Convex combinations: what leaves the hull is noticed."""

from fractions import Fraction

import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.weights.hull import Affine, output_in_hull, signed


def test_the_control_keeps_row_sums_and_breaks_signs():
    pattern = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    moved = Affine()("pattern", pattern)
    assert float(moved.sum()) == pytest.approx(1, abs=1e-15)
    assert float(moved.min()) < 0
    assert torch.equal(Affine()("v", pattern), pattern)
    assert signed(Fraction(-1)) < 0


def test_under_the_control_outputs_leave_hull_and_columns_but_rows_still_sum_to_one():
    found = {f.id: f for f in output_in_hull(Lab(broken=True))}
    assert not found["hull in the plane"].passed
    assert not found["columns"].passed
    assert not found["engine, columns"].passed
    assert found["rows only"].passed
