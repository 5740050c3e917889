"""The problems about induction heads: every draw, and answers computed in another way."""

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("circuits"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("circuits"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_target_is_the_token_after_the_earlier_occurrence():
    for seed in range(30):
        task = built_in()["induction-target"].task(seed)
        v = task.drawn.values
        block = [f"b{i}" for i in range(v["block"])]
        tokens = [f"j{i}" for i in range(v["junk"])] + block + block
        assert tokens[task.drawn.answer.value - 1] == tokens[v["t"]]
        assert task.drawn.answer.value - 1 < v["second"]
