"""The course covers the sources: every row and every claim is practised, and every problem recognises mistakes."""

import pytest

from glassformer.theory import exercises
from glassformer.theory.claims import ALL, coverage
from glassformer.theory.course.answers import Choice, Formula, Matrix, Number, TrueFalse
from glassformer.theory.course.problem import TOPICS, CourseError, Problem
from glassformer.theory.course.registry import SOURCES, built_in, course, errata


def test_every_row_of_the_sources_is_practised():
    practised = {row for problem in built_in().values() for row in problem.rows}
    assert practised == {row.cite for row in coverage()}


def test_every_coding_task_of_the_sources_has_an_exercise():
    tasks = {row.cite for row in coverage() if row.verdict == "TASK"} | {"Ch. 13 ex. 12"}
    listed = {
        cite: [item for item in items if isinstance(item, exercises.Exercise)]
        for rows in course().by_source().values()
        for cite, items in rows
    }
    assert len(tasks) == 13
    assert all(listed[cite] for cite in tasks), [cite for cite in tasks if not listed[cite]]


def test_every_claim_is_practised_and_every_problem_names_a_claim():
    assert {claim for problem in built_in().values() for claim in problem.claims} == set(ALL)
    assert all(problem.claims for problem in built_in().values())


def test_no_problem_or_exercise_is_without_recognised_wrong_answers():
    assert all(len(problem.wrong) >= 2 for problem in built_in().values())
    assert all(exercise.mistakes for exercise in exercises.ALL.values())


def test_every_kind_of_answer_occurs():
    kinds = {type(problem.task(0).drawn.answer) for problem in built_in().values()}
    assert kinds == {Number, Formula, Matrix, TrueFalse, Choice}


def test_the_errata_of_rows_are_shown_with_their_problems():
    shown = {erratum.id for problem in built_in().values() for erratum in errata(problem)}
    listed = {id for row in coverage() for id in row.errata if row.items}
    recorded = {erratum.id for claim in ALL.values() for erratum in claim.errata}
    assert listed & recorded <= shown


def test_the_two_orders_contain_every_problem():
    whole = course()
    by_topic = [item.id for items in whole.by_topic().values() for item in items]
    assert sorted(by_topic) == sorted([*whole.problems, *whole.exercises])
    assert tuple(whole.by_topic()) == TOPICS
    assert all(whole.by_topic().values())
    by_source = {item.id for rows in whole.by_source().values() for _, items in rows for item in items}
    assert set(whole.problems) <= by_source
    assert all(items for rows in whole.by_source().values() for _, items in rows)


def test_problems_and_exercises_have_different_ids():
    whole = course()
    assert not set(whole.problems) & set(whole.exercises)


def test_sheets():
    whole = course()
    assert {item.topic for item in whole.sheet("positions") if isinstance(item, Problem)} == {"positions"}
    assert [whole.sheet(source) for source in SOURCES]
    assert whole.sheet("bishop-12") == whole.sheet("Bishop 12")
    assert [item.id for item in whole.sheet("self-weight, attention")] == ["self-weight", "attention"]
    with pytest.raises(CourseError, match=r"no sheet 'attenton'\. Did you mean attention"):
        whole.sheet("attenton")
    with pytest.raises(CourseError, match="Did you mean self-weight"):
        whole.find("self-wight")


def test_own_problems_must_not_replace_ours(tmp_path):
    words = '[[problem]]\nid = "self-weight"\ntitle = ""\ntopic = "theory"\nstatement = ""\nsolution = ""\n'
    (tmp_path / "a.toml").write_text(words + 'hints = ["", "", ""]\n[problem.wrong]\na = "b"\n')
    (tmp_path / "a.py").write_text("def self_weight(draw): ...\n")
    with pytest.raises(CourseError, match="exists already"):
        course(tmp_path)
    with pytest.raises(CourseError, match="not a folder"):
        course(tmp_path / "none")
    (tmp_path / "a.toml").unlink()
    with pytest.raises(CourseError, match="no TOML file"):
        course(tmp_path)
