"""Rounding in float64, and comparing a computed number with one that is printed to some digits."""

from decimal import Decimal
from typing import Any

UNIT = 2.0**-53
"""u: the relative error of one rounding in float64."""


def gamma(n: int) -> float:
    """n u / (1 - n u): the relative error of a sum of n rounded products (Higham 2002, 3.1)."""
    return n * UNIT / (1 - n * UNIT)


def max_difference(a: Any, b: Any) -> float:
    """Return max |a - b| of two tensors or arrays."""
    return float(abs(a - b).max())


def half_units(value: float, stated: str) -> float:
    """Distance of `value` from the printed number in halves of its last digit: at most 1 where it rounds to it.

    half_units(0.5792, "0.579") is 0.4, half_units(0.5802, "0.579") is 2.4.
    """
    printed = Decimal(stated)
    exponent = printed.as_tuple().exponent
    assert isinstance(exponent, int)
    return float(abs(Decimal(value) - printed) / Decimal(5).scaleb(exponent - 1))
