"""The command that counts the package."""

import pytest

from tests.counts import code_lines, counts


def test_blank_lines_comments_and_docstrings_are_not_code(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Two\nlines."""\n\nX = 1  # a comment\n# another\n\n\ndef f():\n    """One."""\n    return "a\\\nb"\n'
    )
    assert code_lines(path) == 4


def test_every_room_is_counted(tmp_path):
    """The whole package takes 5 seconds."""
    pytest.importorskip("glassformer.kernels")
    files = {"__init__.py": 1, "kernels/cpu/a.cpp": 7, "kernels/b.py": 5, "model/c.py": 3, "model/inner/d.py": 2}
    for name, count in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""A docstring."""\n' + "x = 1\n" * (count - 1))
    found = counts(tmp_path)
    rooms = {name: count for name, count in found.items() if name.startswith("lines of Python in ")}
    assert rooms == {"lines of Python in kernels/": 5, "lines of Python in model/": 5}
    assert found["rooms"] == 2
    assert (found["Python files"], found["lines of Python"]) == (4, 11)
    assert found["of these neither blank, comment nor docstring"] == 7
    assert found["lines of kernels/, all languages"] == 12
    assert found["files in the root of the package"] == 1
