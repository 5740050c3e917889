"""The example of a teacher's own problems in docs/course.md works as it is printed."""

import re

from glassformer.theory.course import course
from tests.cli.asking import run
from tests.docs.blocks import ROOT, blocks
from tests.theory.course.drawing import check_problem


def test_the_example_of_own_problems(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "course.json"))
    found = blocks((ROOT / "docs" / "course.md").read_text(encoding="utf-8"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "counting.toml").write_text(next(b.text for b in found if "[[problem]]" in b.text))
    (tmp_path / "mine" / "counting.py").write_text(next(b.text for b in found if b.language == "python"))
    own = course(tmp_path / "mine").sheet("own")
    assert [problem.id for problem in own] == ["head-width", "softmax-axis"]
    for problem in own:
        check_problem(problem, 20)
    assert run(capsys, "course", "show", "head-width", "--problems", "mine")[0] == 0
    assert (
        run(capsys, *["course", "export", "own", "--problems", "mine", "--format", "markdown", "--out", "own.md"])[0]
        == 0
    )
    assert "How wide is one head?" in (tmp_path / "own.md").read_text()


def test_the_commands_for_students_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "course.json"))
    for words in (["list", "--by", "source"], ["next"], ["show", "self-weight"], ["hint", "self-weight"], ["status"]):
        assert run(capsys, "course", *words)[0] == 0
    shown = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    (answer,) = re.findall(r'glass course answer self-weight "(.+)"', shown)
    assert run(capsys, "course", "answer", "self-weight", answer)[0] == 0


def test_the_answers_of_the_tutorial_get_the_verdicts_that_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "course.json"))
    page = (ROOT / "docs" / "tutorials" / "teach.md").read_text(encoding="utf-8")
    wrong, right = re.findall(r'glass course answer self-weight "(.+)"', page)
    assert run(capsys, "course", "answer", "self-weight", right)[1].strip() == "right: Right."
    assert run(capsys, "course", "answer", "self-weight", wrong)[1].splitlines()[0] in page
