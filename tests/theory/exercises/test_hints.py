"""Every coding exercise has three hints, each closer to the solution than the one before."""

import pytest

from glassformer.theory.exercises import ALL
from glassformer.theory.exercises.hints import LEVELS, _all, hints


def test_every_exercise_has_hints_and_no_hint_is_left_over():
    assert set(_all()) == set(ALL)


@pytest.mark.parametrize("id", ALL)
def test_there_are_three_different_sentences(id):
    found = hints(id)
    assert len(found) == len(set(found)) == LEVELS
    assert all(20 < len(hint) <= 160 and hint.endswith(".") for hint in found)


@pytest.mark.parametrize("id", ALL)
def test_only_the_last_hint_may_contain_lines_of_the_solution(id):
    lines = [line.strip() for line in ALL[id].solution.splitlines() if len(line.strip()) > 30 and '"""' not in line]
    assert not any(line in hint for hint in hints(id)[:2] for line in lines)
