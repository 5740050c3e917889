"""Optional dependencies are named where they are missing, with the command that installs them; words of errors."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from glassformer import errors
from glassformer.errors import listing, nearest

ROOT = Path(__file__).parents[1]
MODULES = {"z3-solver": "z3", "protobuf": "google.protobuf"}


def test_the_extras_are_those_of_the_distribution():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in errors.EXTRAS.items():
        packages = [re.split(r"[<>=]", package)[0] for package in declared[extra]]
        assert [MODULES.get(package, package) for package in packages] == list(modules)


def test_a_module_that_is_blocked_or_absent_is_missing(monkeypatch):
    monkeypatch.setitem(errors.EXTRAS, "theory", ("json", "no_such_module", "no_such_package.module"))
    assert errors.missing("theory") == ["no_such_module", "no_such_package.module"]
    monkeypatch.setitem(sys.modules, "json", None)
    assert "json" in errors.missing("theory")


class Installed:
    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


LOCAL = "run pip install '.[hub]' in the folder of the glassformer repository"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a", "dir_info": {"editable": True}}, LOCAL),
        ({"url": "file:///a", "dir_info": {}}, LOCAL),
        (None, "run pip install 'glassformer[hub]'"),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "run pip install 'glassformer[hub] @ git+https://host/a.git'",
        ),
        (
            {"url": "file:///a/b.whl", "archive_info": {"hash": "1"}},
            "run pip install 'glassformer[hub] @ file:///a/b.whl'",
        ),
    ],
)
def test_the_command_fits_the_installation(monkeypatch, origin, command):
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed(origin))
    assert errors.install("hub") == command


def test_what_is_not_installed_is_a_checkout(monkeypatch):
    def absent(name):
        raise errors.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    assert errors.install("hub") == LOCAL


def test_no_message_names_an_installation_on_its_own():
    """`glassformer[studio]` may not exist on an index: only this module writes such a command."""
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "errors.py":
            assert not re.search(r"glassformer\[|\.\[\w+\]'", path.read_text()), path


def test_a_noun_agrees_with_its_count():
    assert [errors.plural(n, "claim") for n in (0, 1, 2, 1200)] == ["0 claims", "1 claim", "2 claims", "1,200 claims"]
    assert [errors.plural(n, "piece of evidence", "pieces of evidence") for n in (1, 3)] == [
        "1 piece of evidence",
        "3 pieces of evidence",
    ]


def test_listing_reads_as_a_sentence():
    assert listing([1]) == "1"
    assert listing([1, 2]) == "1 or 2"
    assert listing(["a", "b", "c"], "and") == "a, b and c"


def test_nearest_names_or_all_names():
    assert nearest("n_head", ["n_heads", "d_model"]) == " Did you mean n_heads?"
    assert nearest("qqq", ["b", "a"]) == " Fields: a, b."
    assert nearest("qqq", ["b", "a"], "Use one of") == " Use one of a, b."
