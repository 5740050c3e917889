"""The problems about blocks, masks and models: every draw, and answers computed in another way."""

import re

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("architecture"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("architecture"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_dependencies_are_counted_from_masks():
    import numpy as np

    for seed in range(30):
        task = built_in()["dependency-count"].task(seed)
        numbers = [int(x) for x in re.findall(r"\$(\d+)\$", task.statement)]
        if "encoder-only" in task.statement:
            expected = np.ones((numbers[0], numbers[0])).sum()
        elif "decoder-only" in task.statement:
            expected = np.tri(numbers[0]).sum()
        else:
            expected = np.tri(numbers[1]).sum() + np.ones((numbers[1], numbers[0])).sum()
        assert task.drawn.answer.value == expected
