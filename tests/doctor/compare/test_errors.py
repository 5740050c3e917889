"""A refusal is a ValueError, so the command line prints its one sentence."""

from glassformer.doctor.compare.errors import CannotCompareError


def test_it_is_a_value_error():
    assert issubclass(CannotCompareError, ValueError)
