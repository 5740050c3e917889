"""Whether a number rounds to the printed one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.theory.claims.counting.digits import half_units


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
    ],
)
def test_says_whether_a_number_rounds_to_the_printed_one(value, stated, rounds):
    assert (half_units(value, stated) <= 1) == rounds


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
def test_every_number_rounds_to_its_own_rounding(value, places):
    assert half_units(value, f"{value:.{places}f}") <= 1 + 1e-9
