"""How a list of offenders is told."""

from glassformer.weights.errors import WeightsError, some


def test_a_long_list_is_counted_and_cut():
    assert some(["a", "b"]) == "2: a, b"
    assert some("abcdefg") == "7: a, b, c, d, e and 2 more"


def test_errors_are_value_errors():
    assert issubclass(WeightsError, ValueError)
