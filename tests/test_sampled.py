"""Samples of parametrised tests: the same in every run, with every value of every parameter."""

import itertools

import pytest

from tests import sampled
from tests.sampled import draw

GRID = [{("case", i), ("side", j), ("dtype", k)} for i, j, k in itertools.product(range(10), range(3), range(2))]


@pytest.mark.parametrize("seed", ["one test", "another"])
def test_every_value_is_drawn_when_there_are_as_many_cases_as_values(seed):
    kept = draw(GRID, 10, seed)
    assert len(kept) == 10
    assert set().union(*(GRID[i] for i in kept)) == set().union(*GRID)
    assert kept == draw(GRID, 10, seed)


def test_tests_draw_different_cases():
    assert len({frozenset(draw(GRID, 10, str(seed))) for seed in range(5)}) == 5


@pytest.mark.parametrize(("thorough", "tried"), [(False, [10, 20]), (True, [12, 60])])
def test_hypothesis_tries_all_examples_where_slow_tests_run(thorough, tried, monkeypatch):
    monkeypatch.setattr(sampled, "thorough", thorough)
    assert [sampled.examples(12), sampled.examples(60)] == tried


@pytest.mark.parametrize("count", [0, 1, 60, 61])
def test_no_more_is_drawn_than_there_is(count):
    assert len(draw(GRID, count, "")) == min(count, 60)


@pytest.mark.sample(3)
@pytest.mark.parametrize("x", [*range(20), pytest.param(20, marks=pytest.mark.slow)])
def test_the_cases_that_are_not_drawn_are_slow(x, request):
    """Without `slow`, pytest has deselected all cases but three. With all of them, three are not slow."""
    own = [item for item in request.session.items if item.function is request.function]
    default = [item for item in own if item.get_closest_marker("slow") is None]
    assert len(default) == min(3, len(own))
    if "not slow" in request.config.option.markexpr:
        assert own == default
