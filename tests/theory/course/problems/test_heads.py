"""The problems about several heads: every draw, and answers computed in another way."""

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("heads"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("heads"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_blocks_of_the_output_matrix():
    import numpy as np

    for seed in range(20):
        task = built_in()["head-blocks"].task(seed)
        values = task.drawn.values
        product = np.concatenate([values["first"], values["second"]]) @ np.array(values["w"])
        assert product.tolist() == list(task.drawn.answer.value[0])
