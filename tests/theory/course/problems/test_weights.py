"""The problems about attention weights and scores: every draw, and answers computed in another way."""

from fractions import Fraction

import pytest

from glassformer.theory.course import expressions
from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("weights"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("weights"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_answers_about_weights_are_those_of_torch():
    import torch

    for seed in range(20):
        task = built_in()["attention-output"].task(seed)
        a, b, c = (task.drawn.values[name] for name in "abc")
        weights = torch.tensor([a, b, c], dtype=torch.float64).log().softmax(-1)
        expected = weights @ torch.tensor(task.drawn.values["v"], dtype=torch.float64)
        assert torch.allclose(
            expected, torch.tensor([[float(x) for x in task.drawn.answer.value[0]]], dtype=torch.float64)
        )


def test_distance_of_orthogonal_vectors_is_measured():
    import torch

    task = built_in()["orthogonal-distance"].task(0)
    s = task.drawn.values["s"]
    for n, c in ((2, 1), (5, 2), (8, Fraction(2, 3))):
        x = torch.eye(n, dtype=torch.float64) * float(c) ** 0.5
        y = (x @ x.T / s).softmax(-1) @ x
        measured = float((y - x)[0].norm() / x[0].norm())
        tree = expressions.parse(task.reference, ("N", "C"))
        assert abs(float(expressions.evaluate(tree, {"N": n, "C": c})) - measured) < 1e-12
