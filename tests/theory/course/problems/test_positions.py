"""The problems about positions: every draw, and answers computed in another way."""

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("positions"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("positions"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_shift_matrix_moves_every_position():
    import math

    for seed in range(20):
        task = built_in()["shift-matrix"].task(seed)
        (a, b), (c, d) = task.drawn.answer.value
        k, omega = task.drawn.values["k"], task.drawn.values["omega"]
        for n in range(5):
            s, t = math.sin(n * omega), math.cos(n * omega)
            assert math.isclose(a * s + b * t, math.sin((n + k) * omega), abs_tol=1e-12)
            assert math.isclose(c * s + d * t, math.cos((n + k) * omega), abs_tol=1e-12)


def test_rotary_score_is_that_of_rotated_vectors():
    import cmath

    for seed in range(20):
        task = built_in()["rope-score"].task(seed)
        v = task.drawn.values
        q, k = (complex(*v[name]) * cmath.rect(1, v[at] * cmath.pi / 6) for name, at in (("q", "m"), ("k", "n")))
        assert abs((q.conjugate() * k).real - task.drawn.answer.value) < 1e-9
