"""Count the package: rooms, files, lines, kernels. `python -m tests.counts` prints the table of docs/log.md."""

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

from tests.test_architecture import LISTS, SOURCE, entries


def lines(paths: Iterable[Path]) -> int:
    """The number of lines of some files."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def code_lines(path: Path) -> int:
    """Lines of a Python file without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    other = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in other:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(used)


def counts(source: Path = SOURCE) -> dict[str, int]:
    """What there is in a package, by name."""
    from glassformer.kernels.decode import DECODE_KERNELS
    from glassformer.kernels.encode import ENCODE_KERNELS
    from glassformer.kernels.training import TRAINING_KERNELS

    python = sorted(source.rglob("*.py"))
    folders = [folder for folder in source.rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    rooms = [folder for folder in folders if folder.parent == source]
    crowded = [folder for folder in folders if not folder.relative_to(source).as_posix().startswith(LISTS)]
    kernels = [path for path in (source / "kernels").rglob("*") if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")]
    return {
        "rooms": len(rooms),
        "files in the root of the package": sum(path.is_file() for path in source.iterdir()),
        "most entries of a folder, except lists of claims and of page assets": max(len(entries(f)) for f in crowded),
        "registered kernels": len(DECODE_KERNELS) + len(ENCODE_KERNELS) + len(TRAINING_KERNELS),
        "Python files": len(python),
        "lines of Python": lines(python),
        "of these neither blank, comment nor docstring": sum(map(code_lines, python)),
        "lines of kernels/, all languages": lines(kernels),
        **{f"lines of Python in {room.name}/": lines(room.rglob("*.py")) for room in sorted(rooms)},
    }


if __name__ == "__main__":
    for name, count in counts().items():
        print(f"{count:>8,}  {name}")
