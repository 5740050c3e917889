"""Exported sheets: other numbers for each student, solutions only if wanted, pages that are complete."""

import json
from xml.etree import ElementTree

import pytest

from glassformer.theory.course import course
from glassformer.theory.course.problem import CourseError
from glassformer.theory.course.sheets import EMPHASIS, Sheet, Student, export, read_roster, seed_of
from tests.theory.course.class_of_students import execute

IDS = "self-weight, tying-cycle, causal-mask"


def sheet(seed=0, solutions=False):
    return Sheet("Week 1", course().sheet(IDS), Student("Ada", seed), solutions)


def test_students_get_their_own_numbers():
    assert sheet(1).markdown() != sheet(2).markdown()
    assert sheet(1).markdown() == sheet(1).markdown()


@pytest.mark.parametrize("format", ["notebook", "markdown", "pdf-ready-html"])
def test_solutions_are_included_only_if_wanted(format):
    task = course().find("self-weight").task(0)
    assert task.reference not in sheet().write(format)
    assert task.reference in sheet(solutions=True).write(format)
    for item in course().sheet(IDS):
        assert item.title in sheet().write(format)


def test_markdown_tells_how_to_answer():
    text = sheet(5).markdown()
    assert 'self-weight = ""' in text
    assert "seed = 5" in text
    assert "def causal_weights" in text


def test_the_page_is_self_contained_and_shows_formulas():
    page = sheet(solutions=True).page()
    assert "<math" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    body = page[page.index("<body>") : page.index("</html>")]
    assert "<script" not in body
    ElementTree.fromstring(body.replace("&nbsp;", " "))


def test_code_and_tables_of_a_coding_exercise_are_shown_as_such():
    """Names are code on the page, and the lines of a table of arguments stay lines in Markdown."""
    programs = Sheet("Sheet", course().sheet("layer-norm,nano-train"), Student("Ada", 0))
    page, text = programs.page(), programs.markdown()
    assert "<code>gain</code>" in page
    assert "`" not in page[page.index("<body>") :]
    assert "```text\n  text          an array of about 6000 token ids\n  vocab" in text
    assert "```text\\n" in programs.write("notebook")


def test_notebooks_run_offline(tmp_path):
    printed = execute(sheet().notebook(), tmp_path)
    assert "self-weight: no answer yet" in printed
    assert "wrong" in printed  # the program is still the stub
    printed = execute(sheet(3, solutions=True).notebook(), tmp_path)
    assert "self-weight: right." in printed
    assert "tying-cycle: right." in printed


def test_a_notebook_is_valid():
    notebook = json.loads(sheet().write("notebook"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"} | (
            {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        )
        assert set(cell) == wanted


def test_rosters(tmp_path):
    file = tmp_path / "roster.csv"
    file.write_text("student,seed\nAda,7\nGrace,\n")
    assert read_roster(file) == [Student("Ada", 7), Student("Grace", seed_of("Grace"))]
    written = export(course(), IDS, "markdown", tmp_path / "out", read_roster(file))
    assert [path.name for path in written] == ["Ada.md", "Grace.md"]
    assert written[0].read_text() != written[1].read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column"),
        ("name\nAda\n", "no column"),
        ("student\n../../x\n", "cannot be the name"),
        ("student\nAda\nAda\n", "twice"),
        ("student,seed\nAda,x\n", "must be a whole number"),
    ],
)
def test_unusable_rosters(tmp_path, text, message):
    file = tmp_path / "roster.csv"
    file.write_text(text)
    with pytest.raises(CourseError, match=message):
        read_roster(file)
    with pytest.raises(CourseError, match="cannot be read"):
        read_roster(tmp_path / "none.csv")


@pytest.mark.slow
def test_notebooks_run_in_a_kernel(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.reads(sheet(2, solutions=True).write("notebook"), as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "self-weight: right." in printed
    assert "tying-cycle: right." in printed
    assert "right: causal_weights() agrees" in printed


def test_emphasis_is_kept_and_powers_are_not_emphasis():
    page = Sheet("S", course().sheet("reversed-sentence"), Student("", 0), False).page()
    assert "<strong>cannot</strong>" in page
    assert EMPHASIS.sub(r"<\1>", "a**2 + b**2") == "a**2 + b**2"


def test_a_sheet_without_a_roster_names_no_student():
    cells = Sheet("S", course().sheet("self-weight"), Student("", 0), False).notebook()["cells"]
    assert "Student" not in "".join(cells[0]["source"])
    cells = Sheet("S", course().sheet("self-weight"), Student("Ada", 7), False).notebook()["cells"]
    assert "Student: Ada. Run" in "".join(cells[0]["source"])
