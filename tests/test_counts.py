"""The command that counts the package."""

import pytest

from tests.counts import code_lines, counts


def test_blank_lines_comments_and_docstrings_are_not_code(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Two\nlines."""\n\nX = 1  # a comment\n# another\n\n\ndef f():\n    """One."""\n    return "a\\\nb"\n'
    )
    assert code_lines(path) == 4


def test_every_room_is_counted():
    pytest.importorskip("glassformer.kernels")
    found = counts()
    rooms = [count for name, count in found.items() if name.startswith("lines of Python in ")]
    assert len(rooms) == found["rooms"]
    assert sum(rooms) < found["lines of Python"] < sum(rooms) + 1500  # the rest are the files of the root
    assert found["of these neither blank, comment nor docstring"] < found["lines of Python"]
