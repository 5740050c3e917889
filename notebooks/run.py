"""Execute the notebooks of this folder and store their outputs: `make notebooks`.

Each notebook runs from top to bottom in an empty folder, with a kernel of this Python. Times, paths and other metadata
that differ between machines are removed, so that a second run on the same machine changes no file. Names as arguments
(`python notebooks/run.py sizing`) select notebooks. If a cell fails, its error is printed and no file is written.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
SECONDS = 600
"""The longest time that a single cell may take."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a new run. Raises CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=SECONDS,
            startup_timeout=SECONDS,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
        ).execute()
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what differs between two runs, join the printed lines of a cell, and number the cells.

    The plain text of a result that has a display is removed too: it is long, and may contain times and addresses.
    """
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join neighbouring outputs of the same stream: how a kernel divides them depends on time."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if "metadata" in output:
            output.metadata = nbformat.NotebookNode()
        if len(output.get("data", ())) > 1:
            output.data.pop("text/plain", None)
        last = found[-1] if found else None
        if last is not None and output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            found.append(output)
    return found


def main(names: list[str]) -> int:
    chosen = [path for path in NOTEBOOKS if not names or any(name in path.stem for name in names)]
    if not chosen:
        print(f"no notebook is named {' or '.join(names)}: give a part of a file name.", file=sys.stderr)
        return 2
    for path in chosen:
        try:
            notebook = execute(path)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        nbformat.write(notebook, path)
        print(path.name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
