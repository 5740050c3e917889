"""Projection dimensions: the integers of the literature, tails against mpmath, leastness of the exact answers."""

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.sizing import johnson_lindenstrauss
from glassformer.sizing.johnson_lindenstrauss import log_gamma_lower, log_gamma_upper, log_union_bound
from tests.sampled import examples


def test_the_integers_for_a_trillion_points():
    result = johnson_lindenstrauss(1e12, 0.1)
    assert (result.formula, result.strict) == (22_105, 23_684)
    assert (result.exact_squared, result.exact_distance) == (23_821, 5_764)
    assert 10**result.log10_failure_squared == pytest.approx(0.579, abs=5e-4)
    assert result.log10_failure_distance == pytest.approx(math.log10(8.5e-72), abs=0.01)


def test_the_example_of_64_points():
    assert johnson_lindenstrauss(64, 0.3).formula == 370
    assert math.exp(log_union_bound(64, 370, 0.7**2, 1.3**2)) == pytest.approx(4.5e-12, rel=0.02)
    assert math.exp(log_union_bound(64, 370, 0.7, 1.3)) == pytest.approx(0.18, abs=0.005)


@pytest.mark.parametrize("a", [0.5, 1.0, 3.5, 19.5, 20.0, 21.5, 250.0, 12000.0])
@pytest.mark.parametrize("ratio", [1.001, 1.1, 1.5, 4.0])
def test_upper_tail_equals_mpmath(a, ratio):
    with mpmath.workdps(40):
        exact = mpmath.log(mpmath.gammainc(a, mpmath.mpf(a) * mpmath.mpf(ratio), regularized=True))
    # 1e-11: Stirling's series is cut where its next term is 6e-13 at a = 20
    assert log_gamma_upper(a, ratio) == pytest.approx(float(exact), rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("a", [0.5, 1.0, 3.5, 19.5, 20.0, 21.5, 250.0, 12000.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.999])
def test_lower_tail_equals_mpmath(a, ratio):
    with mpmath.workdps(40):
        # the series by hand: mpmath's own gammainc(a, 0, x) does not converge at a = 12000
        x, term, total, n = mpmath.mpf(a) * mpmath.mpf(ratio), mpmath.mpf(1), mpmath.mpf(1), 1
        while term > total * mpmath.mpf(10) ** -35:
            term *= x / (a + n)
            total, n = total + term, n + 1
        exact = a * mpmath.log(x) - x - mpmath.loggamma(a + 1) + mpmath.log(total)
    assert log_gamma_lower(a, ratio) == pytest.approx(float(exact), rel=1e-11, abs=1e-11)


@given(st.integers(2, 10**15), st.floats(0.02, 0.98), st.floats(1e-9, 0.5))
@settings(max_examples=examples(40))
def test_exact_dimensions_are_the_least_that_pass(points, eps, delta):
    result = johnson_lindenstrauss(points, eps, delta)
    bounds = ((result.exact_squared, 1 - eps, 1 + eps), (result.exact_distance, (1 - eps) ** 2, (1 + eps) ** 2))
    for k, low, high in bounds:
        assert log_union_bound(points, k, low, high) <= math.log(delta)
        assert k == 1 or log_union_bound(points, k - 1, low, high) > math.log(delta)
    assert result.exact_distance <= result.exact_squared


def test_text_shows_the_four_answers_and_what_they_are_not():
    text = johnson_lindenstrauss(1e12, 0.1).text()
    for word in ("22,105", "23,684", "23,821", "5,764", "0.579", "8.5e-72", "none is the minimum"):
        assert word in text


@pytest.mark.parametrize("width", [44, 80])
def test_in_a_narrow_terminal_notes_stand_below_their_numbers_and_nothing_is_lost(width):
    result = johnson_lindenstrauss(1e12, 0.1)
    assert max(map(len, result.text(width).splitlines())) <= width
    assert result.text(width).split() == result.text().split()
    rows = result.text(80).splitlines()
    first, second = (next(line for line in rows if number in line) for number in ("22,105", "5,764"))
    assert first.index("22,105") + 6 == second.index("5,764") + 5
    assert "      squared distances, Dasgupta and Gupta" in rows


@pytest.mark.parametrize(
    ("points", "eps", "delta", "message"),
    [
        (1, 0.1, 0.01, "points=1 must be"),
        (2.5, 0.1, 0.01, "points=2.5 must be"),
        (math.inf, 0.1, 0.01, "points=inf"),
        (10, 0.0, 0.01, "eps=0.0 must be strictly"),
        (10, 1.0, 0.01, "eps=1.0 must be strictly"),
        (10, 0.1, 0.0, "delta=0.0"),
    ],
)
def test_bad_input_is_refused(points, eps, delta, message):
    with pytest.raises(ValueError, match=message):
        johnson_lindenstrauss(points, eps, delta)
