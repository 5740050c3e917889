"""What the cells of a notebook call."""

import pytest

from glassformer.theory.course import CourseError
from glassformer.theory.course.notebook import Notebook
from glassformer.theory.exercises import ALL


def test_answers_and_hints(capsys):
    sheet = Notebook(seed=4)
    task = sheet.task("self-weight")
    assert sheet.answer("self-weight", task.reference).right
    assert sheet.answer("self-weight", "") is None
    assert sheet.answer("self-weight", "1").mistake == "one"
    sheet.hint("self-weight", 3)
    assert "e" in capsys.readouterr().out
    with pytest.raises(CourseError, match="levels go from 1 to 3"):
        sheet.hint("self-weight", 4)
    with pytest.raises(CourseError, match="coding exercise"):
        sheet.answer("attention", "1")


def test_programs_are_graded(tmp_path, capsys):
    file = tmp_path / "attention.py"
    file.write_text(ALL["attention"].stub)
    assert Notebook().grade("attention", file).result == "wrong"
    assert "None" in capsys.readouterr().out
