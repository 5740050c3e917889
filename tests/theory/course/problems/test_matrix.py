"""The problems about attention as a matrix: every draw, and answers computed in another way."""

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("matrix"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("matrix"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_block_is_that_of_the_kronecker_product():
    import numpy as np

    for seed in range(20):
        task = built_in()["kronecker-block"].task(seed)
        values = task.drawn.values
        a, w = np.array(values["a"], float), np.array(values["w"], float)
        n, m = values["n"] - 1, values["m"] - 1
        block = np.kron(a, w.T)[2 * n : 2 * n + 2, 2 * m : 2 * m + 2]
        assert np.allclose(block, np.array(task.drawn.answer.value, float))


def test_permuted_weights_are_those_of_permuted_tokens():
    import torch

    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    task = built_in()["permuted-weights"].task(3)
    order = [i - 1 for i in task.drawn.values["sigma"]]
    a = (x @ x.T).softmax(-1)
    moved = (x[order] @ x[order].T).softmax(-1)
    assert torch.allclose(moved, a[order][:, order])
    given = task.drawn.values["a"]
    assert task.drawn.answer.value == [[given[i][j] for j in order] for i in order]
