"""The problems about probabilities: every draw, and answers computed in another way."""

import math
import random
from fractions import Fraction

import pytest

from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("probability"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("probability"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_greedy_pair_by_enumeration():
    for seed in range(30):
        task = built_in()["greedy-pair"].task(seed)
        v = task.drawn.values
        p = {a + b: v[f"p{i}{j}"] for i, a in enumerate("AB") for j, b in enumerate("AB")}
        first = max("AB", key=lambda a: p[a + "A"] + p[a + "B"])
        greedy = max("AB", key=lambda b: p[first + b])
        assert task.drawn.answer.value == Fraction(p[first + greedy], sum(p.values()))
        assert p[first + greedy] < max(p.values())


def test_entropy_rate_by_simulation():
    rng = random.Random(0)
    task = built_in()["entropy-rate"].task(1)
    stay = {"A": float(task.drawn.values["a"]), "B": float(task.drawn.values["b"])}
    state, total, steps = "A", 0.0, 40_000
    for _ in range(steps):
        stays = rng.random() < stay[state]
        total -= math.log(stay[state] if stays else 1 - stay[state])
        state = state if stays else "AB"[state == "A"]
    assert abs(total / steps - task.drawn.answer.value) < 0.02
