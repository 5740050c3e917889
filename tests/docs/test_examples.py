"""The examples in the docstrings of public functions give what they show."""

import doctest
import inspect

import pytest

import glassformer as gf

FUNCTIONS = [name for name in gf.__all__ if inspect.isfunction(getattr(gf, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_example_gives_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mytext.txt").write_text("the cat sat on the mat. " * 400)
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(gf, name), name, globs={"gf": gf})
    assert test.examples
    message: list[str] = []
    result = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=message.append)
    assert result.failed == 0, "".join(message)
