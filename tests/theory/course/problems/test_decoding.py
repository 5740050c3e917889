"""The problems about generating text: every draw, and answers computed in another way."""

import itertools

import pytest

from glassformer.theory.course.problems import decoding as module
from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("decoding"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("decoding"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


@pytest.mark.parametrize(("n", "layers", "valid"), [(3, 1, 64), (3, 2, 24), (4, 2, 480)])
def test_masks_that_allow_a_cache_are_as_many_as_the_claim_counts(n, layers, valid):
    others = [(i, j) for i in range(n) for j in range(n) if i != j]
    found = 0
    for bits in itertools.product((0, 1), repeat=len(others)):
        mask = [[int(i == j) for j in range(n)] for i in range(n)]
        for (i, j), bit in zip(others, bits, strict=True):
            mask[i][j] = bit
        found += module.cache_is_valid(mask, layers)
    assert found == valid


def test_nucleus_is_the_sampler_of_the_package():
    import torch

    from glassformer.generation.sampling import Sampling, distribution

    for seed in range(10):
        task = built_in()["nucleus-share"].task(seed)
        parts = torch.tensor([task.drawn.values["parts"]], dtype=torch.float64)
        kept = distribution((parts / parts.sum()).log(), Sampling(top_p=task.drawn.values["p"]))
        assert abs(float(kept[0, 0]) - float(task.drawn.answer.value)) < 1e-6
