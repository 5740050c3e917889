"""The public API: real functions and classes with docstrings, listed once each in three places that agree."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import glassformer as gf
from tests import api_usage
from tests.training import tiny

ROOT = Path(__file__).parents[1]
NAMES = [name for name in gf.__all__ if name != "__version__"]


def names_for_type_checkers() -> set[str]:
    """Names that the TYPE_CHECKING block of the package imports."""
    tree = ast.parse(Path(gf.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.asname or alias.name
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_lazy_table_and_the_type_checking_imports_and_all_agree():
    assert len(set(gf.__all__)) == len(gf.__all__)
    assert set(NAMES) == {*gf._PUBLIC, *gf._MODULES} == names_for_type_checkers()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_and_typed(name):
    value = getattr(gf, name)
    assert inspect.getdoc(value), name
    assert value.__doc__, f"{name} only inherits a docstring"
    if name in gf._MODULES:
        assert inspect.ismodule(value)
        return
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert value.__module__.startswith("glassformer.")
    if inspect.isfunction(value):
        parameters = inspect.signature(value).parameters.values()
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters), name


@pytest.mark.filterwarnings("ignore")
def test_a_users_file_uses_every_public_name(tmp_path):
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(api_usage.__file__).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gf"
    }
    assert used == set(gf.__all__)
    api_usage.main(tiny.corpus(tmp_path), tmp_path)


@pytest.mark.slow
def test_mypy_accepts_a_users_file_and_refuses_wrong_calls(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import glassformer as gf\ngf.train('run.toml', lop={'steps': 1})\ngf.size()\ngf.generate(3)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    good = subprocess.run([*command, "tests/api_usage.py"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert good.returncode == 0, good.stdout
    bad = subprocess.run([*command, str(wrong)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert {line.split(":")[1] for line in bad.stdout.splitlines() if ": error:" in line} == {"2", "3", "4"}
