"""The example of a teacher's own problems in docs/course.md works as it is printed."""

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
    assert run(capsys, "course", "answer", "self-weight", "e/(e+9)")[0] in (0, 1)
