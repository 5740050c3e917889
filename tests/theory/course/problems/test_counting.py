"""The problems about counting: every draw, and answers computed in another way."""

from fractions import Fraction

import pytest

from glassformer.theory.course.problems import counting as module
from glassformer.theory.course.registry import built_in
from tests.theory.course.drawing import DRAWS, check_problem, of_group


@pytest.mark.parametrize("problem", of_group("counting"), ids=lambda problem: problem.id)
def test_draws(problem):
    check_problem(problem, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", of_group("counting"), ids=lambda problem: problem.id)
def test_a_thousand_draws(problem):
    check_problem(problem, 1000)


def test_counts_are_those_of_the_size_sheet():
    import glassformer as gf
    from glassformer.sizing.parameters import count

    for seed in range(5):
        task = built_in()["decoder-count"].task(seed)
        v = task.drawn.values
        config = gf.presets.gpt2(
            vocab_size=v["v"], d_model=v["d"], n_layers=v["layers"], max_len=v["context"], n_heads=4, d_ff=v["f"]
        )
        assert count(config) == task.drawn.answer.value


def test_width_of_the_source():
    from glassformer.theory.course.problem import Draw

    class Fixed(Draw):
        def integer(self, low, high):
            return 12

        def choice(self, items):
            return Fraction(1, 10)

    assert module.projection_width(Fixed(0)).answer.value == 22_105
