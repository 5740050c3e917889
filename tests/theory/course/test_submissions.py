"""A class of invented students: right, wrong, late, missing, crashing and unreadable submissions."""

import csv
import datetime
import json
import os

import pytest

from glassformer.theory import exercises
from glassformer.theory.course import CourseError, course
from glassformer.theory.course.sheets import Sheet, Student
from glassformer.theory.course.submissions import grade_all, read_folder, write_csv, write_reports
from tests.theory.course.class_of_students import fill, hand_in

IDS = "self-weight,tying-cycle,temperature"


def program() -> str:
    return exercises.ALL["temperature"].solution


@pytest.fixture
def students(tmp_path):
    """Ada is right, Bob makes a known mistake, Eve's program is endless, Joe's file is damaged, Zoe uses a folder."""
    folder = tmp_path / "submissions"
    folder.mkdir()
    roster = [Student(name, seed) for seed, name in enumerate(("Ada", "Bob", "Eve", "Joe", "Zoe", "Una"), 10)]
    items = course().sheet(IDS)
    tasks = {s.name: {i.id: i.task(s.seed) for i in items[:2]} for s in roster}

    def notebook(student, answers, programs):
        hand_in(folder, student.name, fill(Sheet("Week", items, student).notebook(), answers, programs))

    right = {name: {id: task.reference for id, task in listed.items()} for name, listed in tasks.items()}
    notebook(roster[0], right["Ada"], {"temperature": program()})
    notebook(roster[1], {"self-weight": "1", "tying-cycle": "what?"}, {"temperature": "def temperature(:"})
    notebook(roster[2], right["Ada"], {"temperature": "import os\nos._exit(0)\n"})
    (folder / "Joe.ipynb").write_text("{")
    (folder / "Zoe").mkdir()
    (folder / "Zoe" / "answers.toml").write_text(
        "seed = 999\n[answers]\n" + "".join(f"{id} = '''{text}'''\n" for id, text in right["Zoe"].items())
    )
    (folder / "Zoe" / "temperature.py").write_text(program())
    (folder / "link.ipynb").symlink_to(folder / "Ada.ipynb")
    os.utime(folder / "Ada.ipynb", (0, 0))
    return folder, roster


def test_a_class_is_graded(students, tmp_path):
    folder, roster = students
    due = datetime.datetime(2000, 1, 1)
    reports = {r.submission.student: r for r in grade_all(course(), read_folder(folder), IDS, roster, due)}
    states = {name: [result.state for result in report.results] for name, report in reports.items()}
    assert states["Ada"] == ["right", "right", "right"]
    assert states["Zoe"] == ["right", "right", "right"]  # the seed of the roster counts, not the one handed in
    assert states["Bob"] == ["wrong", "unreadable", "unreadable"]
    assert states["Eve"][0] == "wrong"  # the answers of Ada do not fit the numbers of Eve
    assert states["Eve"][2] == "unreadable"
    assert states["Joe"] == states["Una"] == ["missing"] * 3
    assert "JSONDecodeError" in reports["Joe"].submission.problem
    assert [reports[name].late for name in ("Ada", "Bob", "Una")] == [False, True, False]
    assert "exponential of 0 is 1" in reports["Bob"].markdown()
    _written([*reports.values()], tmp_path)


def _written(reports, folder):
    write_csv(reports, folder / "grades.csv")
    rows = list(csv.DictReader((folder / "grades.csv").read_text().splitlines()))
    assert rows[0]["student"] == "Ada"
    assert (rows[0]["points"], rows[0]["total"], rows[0]["temperature"]) == ("3", "3", "right")
    write_reports(reports, folder / "reports")
    result = json.loads((folder / "reports" / "Ada.json").read_text())
    assert result["score"] == 3
    assert [test["status"] for test in result["tests"]] == ["passed"] * 3
    assert (folder / "reports" / "Bob.md").read_text().startswith("# Bob: 0 of 3")


def test_without_a_sheet_everything_that_was_answered_counts(students):
    folder, roster = students
    reports = grade_all(course(), read_folder(folder), None, roster)
    assert {result.item.id for result in reports[0].results} == set(IDS.split(","))


def test_answers_are_never_run(tmp_path):
    target = tmp_path / "touched"
    code = f"sheet.answer('self-weight', open({str(target)!r}, 'w').write('x'))\nsheet.answer('tying-cycle', 'a 1')"
    hand_in(tmp_path, "Mallory", {"cells": [{"cell_type": "code", "source": code, "metadata": {}}], "metadata": {}})
    (one,) = read_folder(tmp_path)
    assert one.answers == {"tying-cycle": "a 1"}
    assert not target.exists()


def test_unusable_folders(tmp_path):
    with pytest.raises(CourseError, match="not a folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(CourseError, match="contains no submission"):
        read_folder(tmp_path)
    (tmp_path / "Ada").mkdir()
    with pytest.raises(CourseError, match="no submission answers"):
        grade_all(course(), read_folder(tmp_path))


def test_a_name_cannot_become_a_formula_of_a_spreadsheet(tmp_path):
    (tmp_path / "s" / "=1+1").mkdir(parents=True)
    reports = grade_all(course(), read_folder(tmp_path / "s"), "self-weight")
    write_csv(reports, tmp_path / "g.csv")
    assert (tmp_path / "g.csv").read_text().splitlines()[1].startswith("'=1+1")


HOSTILE = {
    "endless": "def temperature(*a):\n    while True:\n        pass\n",
    "hungry": "def temperature(*a):\n    return [0] * 10**11\n",
    "crashing": "import ctypes\n\n\ndef temperature(*a):\n    ctypes.string_at(0)\n",
    "reading": "def temperature(*a):\n    return open(SECRET).read()\n",
    "writing": "open(SECRET, 'w').write('x')\n\n\ndef temperature(*a): ...\n",
    "leaving": "import os\nos._exit(0)\n",
}


@pytest.mark.slow
def test_hostile_programs_are_graded_or_refused_and_touch_nothing(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("kept")
    folder = tmp_path / "submissions"
    for name, source in {**HOSTILE, "honest": program()}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "temperature.py").write_text(source.replace("SECRET", repr(str(secret))))
    reports = grade_all(course(), read_folder(folder), "temperature,self-weight")
    points = {report.submission.student: report.points for report in reports}
    assert points == {**dict.fromkeys(HOSTILE, 0), "honest": 1}
    assert secret.read_text() == "kept"
    messages = {report.submission.student: report.results[0].message for report in reports}
    assert "did not finish" in messages["endless"]
    assert "kept" not in messages["reading"]
