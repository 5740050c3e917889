"""All exercises: their stubs start, their mistakes are told apart, their pointers lead somewhere."""

import itertools

import numpy as np
import pytest

from glassformer.theory.claims.registry import coverage
from glassformer.theory.exercises import ALL, ExerciseError, find, judge

EXERCISES = list(ALL.values())
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)


def cases_of(exercise):
    return exercise.cases(np.random.default_rng(0))


def answers(exercise, changes):
    with np.errstate(all="ignore"):
        return [judge.right(exercise, case, changes) for case in cases_of(exercise)]


def test_the_exercises_that_there_are():
    assert set(ALL) == {
        "attention", "multi-head", "causal-mask", "kv-cache", "sinusoidal", "rope", "temperature", "top-k", "top-p",
        "block-parameters", "gpt2-parameters", "ngram", "pre-norm-block", "layer-norm",
    }  # fmt: skip


def test_an_unknown_exercise_names_the_nearest():
    with pytest.raises(ExerciseError, match="Did you mean attention"):
        find("atention")
    with pytest.raises(ExerciseError, match="Exercises: attention, "):
        find("zzz")


@each
def test_the_stub_is_python_that_defines_the_function_and_solves_nothing(exercise):
    names = {}
    exec(compile(exercise.stub, "stub", "exec"), names)
    case = cases_of(exercise)[0]
    assert names[exercise.function](*case.arguments.values()) is None


@each
def test_each_mistake_is_wrong_and_differs_from_every_other(exercise):
    for mistake in exercise.mistakes:
        given = answers(exercise, mistake.changes)
        assert judge.wrong_cases(exercise, cases_of(exercise), given), mistake.message
        assert judge.recognise(exercise, cases_of(exercise), given) == (mistake,), mistake.message
        assert judge.diagnose(exercise, cases_of(exercise), given) == [mistake.message]


@each
def test_two_mistakes_at_once_are_both_named_or_look_like_one(exercise):
    """A pair whose answers no single mistake gives is recognised as a pair that gives these answers."""
    for pair in itertools.islice(itertools.combinations(exercise.mistakes, 2), 0, None, 3):
        changes = {name: value for mistake in pair for name, value in mistake.changes.items()}
        if len(changes) < sum(len(mistake.changes) for mistake in pair):
            continue
        given = answers(exercise, changes)
        if judge.wrong_cases(exercise, cases_of(exercise), given):
            assert 1 <= len(judge.recognise(exercise, cases_of(exercise), given)) <= 2


@each
def test_the_solution_is_right_by_its_own_judgement_and_finite(exercise):
    given = answers(exercise, {})
    assert judge.diagnose(exercise, cases_of(exercise), given) == []
    assert all(np.isfinite(part).all() for answer in given for part in answer)
    assert all(len(answer) == len(exercise.returns) for answer in given)


@each
def test_problem_and_sentences_are_words_a_student_can_use(exercise):
    assert len(exercise.problem) > 100
    assert f"def {exercise.function}(" in exercise.stub
    assert all(len(mistake.message) > 15 and not mistake.message.endswith(".") for mistake in exercise.mistakes)
    known = {id for row in coverage() for id in row.items}
    assert exercise.claims
    assert set(exercise.claims) <= known
