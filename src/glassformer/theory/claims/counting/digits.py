"""Comparing a computed number with one printed to so many digits."""

from decimal import Decimal


def half_units(value: float, stated: str) -> float:
    """Distance of `value` from the printed number in halves of its last digit: at most 1 where it rounds to it.

    half_units(0.5792, "0.579") is 0.4, half_units(0.5802, "0.579") is 2.4.
    """
    printed = Decimal(stated)
    exponent = printed.as_tuple().exponent
    assert isinstance(exponent, int)
    return float(abs(Decimal(value) - printed) / Decimal(5).scaleb(exponent - 1))
