"""The problems about rank, gradient steps and collapse: every draw, and answers computed in another way."""

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("theory"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("theory"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_gradient_step_is_autograds():
    import torch

    for seed in range(20):
        task = built_in()["gradient-prediction"].task(seed)
        x, y, query = (torch.tensor(task.drawn.values[name], dtype=torch.float64) for name in ("x", "y", "query"))
        w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        (0.5 * (x @ w - y).square().sum()).backward()
        predicted = float(query @ (-float(task.drawn.values["eta"]) * w.grad))
        assert abs(predicted - float(task.drawn.answer.value)) < 1e-9


def test_margin_of_the_fourier_circuit():
    import math

    p = 31
    logits = [sum(math.cos(2 * math.pi * k * gap / p) for k in range(1, 16)) for gap in range(p)]
    task = next(t for t in map(built_in()["fourier-margin"].task, range(500)) if t.drawn.values["p"] == p)
    assert abs(logits[0] - max(logits[1:]) - float(task.drawn.answer.value)) < 1e-9
