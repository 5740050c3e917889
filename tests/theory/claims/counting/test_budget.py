"""Training budgets and projection dimensions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.sizing import PUBLISHED, LossFit
from glassformer.sizing.johnson_lindenstrauss import log_union_bound
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.counting import budget


@given(st.floats(-30, 30))
def test_golden_section_finds_the_bottom_of_a_parabola(bottom):
    assert budget.golden_minimum(lambda x: (x - bottom) ** 2, -40, 40) == pytest.approx(bottom, abs=1e-6)


@given(st.floats(0.2, 0.6), st.floats(0.2, 0.6), st.floats(100, 3000), st.floats(100, 3000))
def test_search_and_closed_form_agree_for_any_fit(alpha, beta, a, b):
    fit = LossFit(1.0, a, b, alpha, beta)
    assert budget.golden_search(fit, 1e20 / 6) == pytest.approx(fit.optimum(1e20).parameters, rel=1e-4)


def test_search_under_another_constraint_finds_another_model():
    best = PUBLISHED.optimum(1.2e24).parameters
    assert budget.golden_search(PUBLISHED, 1.2e24) > 1.5 * best


@pytest.mark.parametrize("k", [5_764, 22_105])
@pytest.mark.parametrize("bounds", [("0.9", "1.1"), ("0.81", "1.21")])
def test_size_sheet_and_forty_digits_agree_on_the_union_bound(k, bounds):
    quick = log_union_bound(1e12, k, *map(float, bounds))
    assert math.log(budget.union_bound(k, *bounds)) == pytest.approx(quick, abs=1e-8)


def test_too_few_dimensions_break_distances():
    assert budget._projection(Lab(), 370)[0] == 0
    assert budget._projection(Lab(), 20)[0] > 50
