"""Rounding, and whether a number rounds to the printed one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.theory.claims.rounding import half_units, max_difference


@pytest.mark.parametrize(
    ("value", "stated", "rounds"),
    [
        (0.5792, "0.579", True),
        (0.5802, "0.579", False),
        (99.467, "99", True),
        (99.51, "99", False),
        (4.4841e10, "4.48e10", True),
        (4.486e10, "4.48e10", False),
        (8.547e-72, "8.5e-72", True),
        (8.56e-72, "8.5e-72", False),
        (0.0015011409, "1.501141e-3", True),
        (0.0015011409, "1.501142e-3", False),
        (0.19893301, "0.1989330", True),
    ],
)
def test_half_units_is_at_most_1_if_a_number_rounds_to_the_printed_one(value, stated, rounds):
    assert (half_units(value, stated) <= 1) == rounds


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
def test_every_number_rounds_to_its_own_rounding(value, places):
    assert half_units(value, f"{value:.{places}f}") <= 1 + 1e-9


def test_the_largest_difference_is_that_of_tensors_and_of_arrays():
    a, b = [[1.0, -2.0], [0.5, 3.0]], [[1.0, 2.0], [0.0, 3.0]]
    assert max_difference(torch.tensor(a), torch.tensor(b)) == 4.0
    assert max_difference(np.array(a), np.array(b)) == 4.0
    assert np.isnan(max_difference(torch.tensor([1.0, float("nan")]), torch.ones(2)))
