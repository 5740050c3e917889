"""The problems about the worked example and other networks: every draw, and answers computed in another way."""

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("comparison"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("comparison"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_output_is_torchs():
    import torch

    for seed in range(20):
        task = built_in()["example-output"].task(seed)
        scores, v = (torch.tensor(task.drawn.values[name], dtype=torch.float64) for name in ("scores", "v"))
        expected = (scores / 2**0.5).softmax(-1) @ v
        assert torch.allclose(expected, torch.tensor(task.drawn.answer.value[0], dtype=torch.float64))


def test_gates_are_those_of_torch():
    import torch

    task = built_in()["gate-count"].task(0)
    v = task.drawn.values
    layer = getattr(torch.nn, v["name"])(v["x"], v["h"], device="meta")
    biases = layer.bias_hh_l0.numel()  # torch has two bias vectors per gate
    assert sum(p.numel() for p in layer.parameters()) - biases == task.drawn.answer.value
