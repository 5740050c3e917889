"""All exercises: their stubs start, their mistakes are distinguished, their pointers lead somewhere."""

import contextlib
import itertools

import numpy as np
import pytest

from glassformer.theory.claims.registry import coverage
from glassformer.theory.exercises import ALL, ExerciseError, find, judge

EXERCISES = list(ALL.values())
RANKS = "Topic 10 ex. 2.3 + hint 2.3"
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)


def cases_of(exercise, seed=0):
    return exercise.cases(np.random.default_rng(seed))


def answers(exercise, mistakes=(), seed=0):
    return [judge.right(exercise, case, mistakes) for case in cases_of(exercise, seed)]


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
    answer = names[exercise.function](*case.arguments.values())
    assert (answer is None) == (not exercise.broken)
    assert max(map(len, exercise.stub.splitlines())) <= 80


@contextlib.contextmanager
def remembered_answers():
    """Let the judge compute each answer once: it compares every answer with those of all mistakes."""
    known, compute = {}, judge.right

    def right(exercise, case, mistakes=()):
        key = id(case), tuple(mistake.message for mistake in mistakes)
        if key not in known:
            try:
                known[key] = compute(exercise, case, mistakes)
            except Exception as error:
                known[key] = error
        if isinstance(known[key], Exception):
            raise known[key]
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "right", right)
        yield


def check_draw(exercise, seed):
    """The reference is right, and each recorded wrong solution is rejected with its own explanation."""
    cases = cases_of(exercise, seed)
    with remembered_answers():
        assert judge.diagnose(exercise, cases, [judge.right(exercise, case) for case in cases]) == [], seed
        for mistake in exercise.mistakes:
            given = [judge.right(exercise, case, (mistake,)) for case in cases]
            assert judge.wrong_cases(exercise, cases, given), (seed, mistake.message)
            assert judge.diagnose(exercise, cases, given) == [mistake.message], (seed, mistake.message)


@pytest.mark.sample(12)
@each
def test_each_mistake_is_wrong_and_gets_its_own_explanation(exercise):
    assert len({mistake.message for mistake in exercise.mistakes}) == len(exercise.mistakes) >= 5
    for seed in range(1 if exercise.accepts else 2):  # a training for each mistake takes longer
        check_draw(exercise, seed)


@pytest.mark.slow
@each
def test_many_draws(exercise):
    for seed in range(1000):
        check_draw(exercise, seed)


@pytest.mark.sample(12)
@each
def test_two_mistakes_at_once_are_both_named_or_look_like_one(exercise):
    """A pair whose answers no single mistake gives is recognised as a pair that gives these answers."""
    if exercise.accepts:
        return
    for pair in itertools.islice(itertools.combinations(exercise.mistakes, 2), 0, None, 5):
        if exercise.variant(pair) is None:
            continue
        try:
            given = answers(exercise, pair)
        except (ValueError, IndexError):  # two mistakes may be incompatible
            continue
        if judge.wrong_cases(exercise, cases_of(exercise), given):
            assert 1 <= len(judge.recognise(exercise, cases_of(exercise), given)) <= 2


@each
def test_the_solution_is_right_by_its_own_judgement_and_finite(exercise):
    given = answers(exercise)
    assert judge.diagnose(exercise, cases_of(exercise), given) == []
    finite = all(np.isfinite(part).all() for answer in given for part in answer)
    assert finite or "NaN" in exercise.problem
    assert all(len(answer) == len(exercise.returns) for answer in given)


@each
def test_problem_and_sentences_are_words_a_student_can_use(exercise):
    assert len(exercise.problem) > 100
    assert f"def {exercise.function}(" in exercise.stub
    assert all(len(mistake.message) > 15 and not mistake.message.endswith(".") for mistake in exercise.mistakes)
    known = {id for row in coverage() for id in row.items}
    assert exercise.claims
    assert set(exercise.claims) <= known


CODING_TASKS = {*(f"Ch. 13 ex. {n}" for n in range(11, 21)), *(f"Topic 10 ex. 2.{n}" for n in (1, 2)), RANKS}
"""Every row of the coverage table that asks for code."""


def test_every_coding_task_of_the_sources_has_an_exercise():
    assert {row.cite for row in coverage()} >= CODING_TASKS
    tasks = {row.cite for row in coverage() if str(row.verdict) == "TASK"}
    assert tasks <= CODING_TASKS
    assert {cite for exercise in EXERCISES for cite in exercise.sources} == CODING_TASKS
