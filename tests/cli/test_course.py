"""`glass course` as students and teachers meet it."""

import json

import pytest

from glassformer.theory.course import course
from tests.cli.asking import run, run_json
from tests.theory.course.class_of_students import fill, hand_in


@pytest.fixture(autouse=True)
def progress(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "course.json"))
    monkeypatch.chdir(tmp_path)


def test_lists(capsys):
    code, out, _ = run(capsys, "course")
    assert code == 0
    assert out.index("self-weight") < out.index("shift-matrix") < out.index("rank-claim")
    code, rows = run_json(capsys, "course", "list", "--by", "source")
    cites = [row["source"] for row in rows["items"]]
    assert cites.index("Solution manual ex. 1") < cites.index("Ch. 13 ex. 1 (a)") < cites.index("Bishop 12.1")
    code, rows = run_json(capsys, "course", "list", "positions")
    assert {"shift-matrix", "rope-score"} <= {row["id"] for row in rows["items"]}


def test_a_student_works_through_problems(capsys):
    _, first = run_json(capsys, "course", "next")
    assert first["id"] == "weights-bound"
    task = course().find("weights-bound").task(0)
    code, wrong = run_json(capsys, "course", "answer", "weights-bound", next(iter(task.wrong.values())))
    assert (code, wrong["result"], wrong["solved"]) == (1, "wrong", False)
    code, out, _ = run(capsys, "course", "answer", "weights-bound", "perhaps")
    assert code == 2
    assert "must begin with true or false" in out
    code, out, _ = run(capsys, "course", "answer", "weights-bound", task.reference)
    assert (code, out.strip()) == (0, "right: Right.")
    _, following = run_json(capsys, "course", "next")
    assert following["id"] == "softmax-fraction"
    _, status = run_json(capsys, "course", "status")
    assert status["topics"][0]["solved"] == 1
    assert "1 of" in run(capsys, "course", "status")[1]


def test_hints_have_three_levels_and_new_numbers_begin_again(capsys):
    levels = [run_json(capsys, "course", "hint", "attention")[1]["level"] for _ in range(4)]
    assert levels == [1, 2, 3, 3]
    assert "hint 3 of 3: scores = q @ k.T" in run(capsys, "course", "hint", "attention")[1]
    levels = [run_json(capsys, "course", "hint", "self-weight")[1]["level"] for _ in range(4)]
    assert levels == [1, 2, 3, 3]
    before = run_json(capsys, "course", "show", "self-weight")[1]["statement"]
    after = run_json(capsys, "course", "show", "self-weight", "--new")[1]["statement"]
    assert before != after
    assert run_json(capsys, "course", "show", "self-weight")[1]["statement"] == after
    assert run_json(capsys, "course", "hint", "self-weight")[1]["level"] == 1


def test_the_solution_names_errors_of_the_sources(capsys):
    code, facts = run_json(capsys, "course", "solution", "rope-score")
    assert code == 0
    assert [erratum["id"] for erratum in facts["errata"]] == ["E30"]
    out = run(capsys, "course", "solution", "rope-score")[1]
    assert "glass check rope-relative --explain" in out
    example = facts["errata"][0]["example"]
    assert example.splitlines()[-1] in out
    found: dict = {}
    exec(example, found)
    assert not found["holds"]
    assert "$" not in out


def test_programs_are_graded(capsys, tmp_path):
    stub = run_json(capsys, "course", "show", "attention")[1]["stub"]
    (tmp_path / "a.py").write_text(stub)
    code, facts = run_json(capsys, "course", "answer", "attention", "--file", "a.py")
    assert (code, facts["result"]) == (1, "wrong")
    code, _, err = run(capsys, "course", "answer", "attention")
    assert code == 2
    assert "--file FILE" in err
    assert "grades it" in run(capsys, "course", "show", "attention")[1]
    (tmp_path / "b.py").write_text(run_json(capsys, "course", "solution", "attention")[1]["solution"])
    assert run(capsys, "course", "answer", "attention", "--file", "b.py")[0] == 0


def test_a_teacher_exports_and_grades(capsys, tmp_path):
    (tmp_path / "roster.csv").write_text("student\nAda\nBob\n")
    code, facts = run_json(
        capsys, "course", "export", "self-weight,tying-cycle", "--seed-per-student", "roster.csv", "--out", "sheets"
    )
    assert (code, facts["written"]) == (0, ["sheets/Ada.ipynb", "sheets/Bob.ipynb"])
    code, _, err = run(
        capsys, "course", "export", "self-weight,tying-cycle", "--seed-per-student", "roster.csv", "--out", "sheets"
    )
    assert code == 2
    assert "--force" in err
    notebook = json.loads((tmp_path / "sheets" / "Ada.ipynb").read_text())
    seed = notebook["metadata"]["glassformer"]["seed"]
    (tmp_path / "in").mkdir()
    hand_in(tmp_path / "in", "Ada", fill(notebook, {"self-weight": course().find("self-weight").task(seed).reference}))
    words = [
        "course",
        "grade",
        "in",
        "--csv",
        "grades.csv",
        "--reports",
        "reports",
        "--sheet",
        "self-weight,tying-cycle",
    ]
    code, facts = run_json(capsys, *words, "--seed-per-student", "roster.csv")
    assert code == 0
    assert [(row["student"], row["points"], row["total"]) for row in facts["students"]] == [
        ("Ada", 1, 2),
        ("Bob", 0, 2),
    ]
    assert (tmp_path / "grades.csv").exists()
    assert (tmp_path / "reports" / "Ada.json").exists()
    assert "Ada" in run(capsys, "course", "grade", "in")[1]


@pytest.mark.parametrize(("format", "file"), [("markdown", "positions.md"), ("pdf-ready-html", "positions.html")])
def test_other_formats(capsys, tmp_path, format, file):
    code, out, _ = run(capsys, "course", "export", "positions", "--format", format)
    assert (code, out.strip()) == (0, file)
    assert "rotary" in (tmp_path / file).read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show", "name a problem"),
        ("show self-wight", "Did you mean self-weight"),
        ("list cooking", "there is no sheet"),
        ("export", "name a sheet"),
        ("grade", "name a folder"),
        ("grade nowhere", "is not a folder"),
        ("grade . --due soon", "must be a time"),
        ("answer self-weight", "the answer is missing"),
        ("list --problems nowhere", "is not a folder"),
        ("dance", "dance"),
    ],
)
def test_mistakes_are_one_sentence(capsys, words, message):
    code, out, err = run(capsys, "course", *words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
