"""The notebooks are valid, short, offline, and their stored outputs are those of a run without an error."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from tests.docs.blocks import ROOT
from tests.pages.hostile import assert_static_fragment, assert_static_svg

pytest.importorskip("nbclient")
import nbformat

NAMES = (
    "1_first_steps",
    "2_claims_of_a_chapter",
    "3_induction_heads",
    "4_debugging_a_port",
    "5_training_dynamics",
    "6_sizing",
)
QUICK = ("6_sizing",)
"""Whose code also runs in the default suite, without a kernel of Jupyter."""
FOLDER = ROOT / "notebooks"


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What each cell shows: the name of a stream, or the formats of a display."""
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [[output.get("name") or ",".join(sorted(output.data)) for output in shown] for shown in cells]


def test_the_folder_has_these_notebooks_and_the_page_names_them():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert all(f"../notebooks/{name}.ipynb" in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_starts_with_its_title(name):
    notebook = stored(name)
    nbformat.validate(notebook)
    assert notebook.cells[0].source.startswith("# ")
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    assert all(not cell.metadata for cell in notebook.cells)
    assert [cell.id for cell in notebook.cells] == [f"cell-{i}" for i in range(len(notebook.cells))]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000


@pytest.mark.parametrize("name", NAMES)
def test_every_code_cell_ran_once_from_top_to_bottom_without_an_error(name):
    notebook = stored(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = outputs(notebook)
    assert len(shown) >= 4
    assert {output.output_type for output in shown} <= {"stream", "execute_result", "display_data"}
    assert "stderr" not in {output.get("name") for output in shown}


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_static_and_name_no_path_or_address(name):
    for output in outputs(stored(name)):
        data = output.get("data", {})
        assert data.keys() <= {"text/html", "text/plain", "text/markdown", "image/svg+xml"}
        if "text/html" in data:
            assert_static_fragment(data["text/html"])
        if "image/svg+xml" in data:
            assert_static_svg(data["image/svg+xml"])
        text = json.dumps(output, ensure_ascii=False)
        assert not re.search(
            r"(?<![\w:/.])/(?:home|root|tmp|usr|work|var|Users)/|(?<!\w)[A-Z]:\\\\|site-packages", text
        )
        assert not re.search(r"\b0x[0-9a-f]{8,}\b|\b\d+(?:\.\d+)? ?s wall\b|20\d\d-\d\d-\d\d", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_written_in_short_plain_sentences(name):
    for cell in stored(name).cells:
        if cell.cell_type == "markdown":
            assert len(cell.source) < 700
            assert not re.search(r"https?://", cell.source)
        else:
            assert "pip install" not in cell.source
            assert max(map(len, cell.source.splitlines())) <= 130


def test_what_runs_them_is_a_dependency_of_developers_and_pinned():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in ("nbclient", "nbformat", "ipykernel"):
        assert any(re.match(rf"{name}\b", entry) for entry in extra)
        assert name in pinned


RUN = """
import sys
from pathlib import Path
import nbformat
from notebooks.run import execute
nbformat.write(execute(Path(sys.argv[1])), sys.argv[2])
"""


@pytest.mark.parametrize("name", QUICK)
def test_the_code_of_a_notebook_runs_and_prints_where_it_did(name, capsys):
    names: dict[str, object] = {}
    for cell in stored(name).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, name, "exec"), names)
            printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
            assert bool(capsys.readouterr().out) == bool(printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_is_stored(name, tmp_path):
    """In a process of its own, so that the event loop of the client and its warnings stay there."""
    target = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", RUN, str(FOLDER / f"{name}.ipynb"), str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert kinds(nbformat.read(target, as_version=4)) == kinds(stored(name))


def test_an_unknown_name_is_refused_in_one_sentence():
    command = [sys.executable, str(FOLDER / "run.py"), "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "no notebook is named nonsense: give a part of a file name.\n"


def test_cleaning_removes_what_differs_between_runs():
    from notebooks.run import cleaned

    cell = nbformat.v4.new_code_cell("x", execution_count=1, metadata={"execution": {"iopub": "12:00"}})
    line = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a\n", "b\n")]
    shown = nbformat.v4.new_output(
        "display_data", {"text/html": "<b></b>", "text/plain": "<X at 0x7f>"}, metadata={"t": 1}
    )
    cell.outputs = [*line, shown, nbformat.v4.new_output("display_data", {"text/plain": "3"})]
    found = cleaned(nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}}))
    assert found.cells[0].metadata == {}
    assert [output.get("text") or dict(output.data) for output in found.cells[0].outputs] == [
        "a\nb\n",
        {"text/html": "<b></b>"},
        {"text/plain": "3"},
    ]
    assert found.cells[0].outputs[1].metadata == {}
    assert "widgets" not in found.metadata
