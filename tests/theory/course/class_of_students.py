"""Submissions of invented students, and a small runner for exported notebooks."""

import contextlib
import io
import json
import os
from pathlib import Path


def fill(notebook: dict, answers: dict[str, str], programs: dict[str, str] | None = None) -> dict:
    """Return the notebook as a student leaves it: answers and programs in its cells."""
    for cell in notebook["cells"]:
        id = cell["metadata"].get("glassformer", {}).get("id")
        if id in answers:
            cell["source"] = f"sheet.answer({id!r}, {answers[id]!r})"
        elif programs and id in programs:
            cell["source"] = f"%%writefile {id}.py\n{programs[id]}"
    return notebook


def execute(notebook: dict, folder: Path) -> str:
    """Run the code cells of a notebook in their order, as a kernel does, and return what they print."""
    names: dict = {}
    printed = io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            for cell in notebook["cells"]:
                source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
                if cell["cell_type"] != "code":
                    continue
                if source.startswith("%%writefile "):
                    first, _, rest = source.partition("\n")
                    Path(first.split()[1]).write_text(rest)
                else:
                    exec(source, names)
    finally:
        os.chdir(before)
    return printed.getvalue()


def hand_in(folder: Path, name: str, notebook: dict) -> None:
    (folder / f"{name}.ipynb").write_text(json.dumps(notebook))
