"""Compute-optimal training: the rule's integers, the closed form against a numerical minimum, both ways round."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.sizing import CORRECTED, PUBLISHED, LossFit, chinchilla

FITS = pytest.mark.parametrize("fit", [PUBLISHED, CORRECTED], ids=["published", "corrected"])


def test_the_rule_of_thumb_is_exact():
    rule = chinchilla(flops=1.2e24).allocations[0]
    assert (rule.parameters, rule.tokens, rule.flops) == (1e11, 2e12, 1.2e24)


def test_the_two_fits_disagree_as_reported():
    _, published, corrected = chinchilla(flops=1.2e24).allocations
    assert published.parameters == pytest.approx(4.48e10, rel=2e-3)
    assert published.tokens == pytest.approx(4.46e12, rel=2e-3)
    assert published.ratio == pytest.approx(99, abs=1)
    assert corrected.parameters == pytest.approx(1.05e11, rel=5e-3)
    assert corrected.ratio == pytest.approx(18, abs=0.5)


def golden_section(f, low: float, high: float) -> float:
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if f(a) < f(b) else (a, high)
    return (low + high) / 2


@FITS
@pytest.mark.parametrize("C", [1e18, 1.2e24])
def test_closed_form_is_the_numerical_minimum(fit, C):
    best = golden_section(lambda log_n: fit.loss(math.exp(log_n), C / 6 / math.exp(log_n)), 5.0, 40.0)
    found = fit.optimum(C)
    # The loss is flat at its minimum: N is only determined to the square root of the precision of L.
    assert math.log(found.parameters) == pytest.approx(best, abs=1e-6)
    assert found.loss == pytest.approx(fit.loss(math.exp(best), C / 6 / math.exp(best)), rel=1e-12)
    assert 6 * found.parameters * found.tokens == pytest.approx(C, rel=1e-12)


@FITS
def test_optimal_parameters_grow_with_their_power_of_compute(fit):
    grown = fit.optimum(1e22).parameters / fit.optimum(1e20).parameters
    assert grown == pytest.approx(100 ** (fit.beta / (fit.alpha + fit.beta)), rel=1e-12)


@given(st.floats(1e15, 1e27))
def test_all_three_ways_round_agree(C):
    for i, there in enumerate(chinchilla(flops=C).allocations):
        from_n = chinchilla(params=there.parameters).allocations[i]
        from_d = chinchilla(tokens=there.tokens).allocations[i]
        for back in (from_n, from_d):
            assert back.flops == pytest.approx(C, rel=1e-9)
            assert back.loss == pytest.approx(there.loss, rel=1e-9)


def test_text_and_dict_name_every_method():
    result = chinchilla(flops=1.2e24)
    assert [row["method"] for row in result.to_dict()["allocations"]] == [a.method for a in result.allocations]
    for word in ("rule D = 20·N", "Hoffmann", "Besiroglu", "1e+11", "2e+12", "99.5"):
        assert word in result.text()


@pytest.mark.parametrize("width", [40, 80])
def test_in_a_narrow_terminal_nothing_is_lost(width):
    result = chinchilla(flops=1.2e24)
    assert max(map(len, result.text(width).splitlines())) <= width
    assert result.text(width).split() == result.text().split()
    rows = result.text(80).splitlines()[2:6]
    assert len({len(row) for row in rows}) == 1  # aligned, one line for each


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"flops": 1e20, "tokens": 1e9}, "exactly one"),
        ({"flops": -1.0}, "flops=-1.0 must be a positive"),
        ({"flops": math.inf}, "must be a positive finite"),
        ({"flops": 1e20, "ratio": 0.0}, "ratio=0.0"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        chinchilla(**arguments)


def test_a_fit_without_a_minimum_is_refused():
    with pytest.raises(ValueError, match=r"LossFit\.alpha=0"):
        LossFit(E=1.0, A=1.0, B=1.0, alpha=0.0, beta=0.3)
