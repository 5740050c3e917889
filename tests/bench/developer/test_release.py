"""The check of a release sees what an archive lacks."""

import glob
import sys
import tarfile
import tomllib
import zipfile

import pytest

from glassformer.bench.developer import release

VERSION = tomllib.loads((release.ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def archives(tmp_path):
    """A wheel and an sdist with everything, or without some files."""

    def write(lacking=()):
        wheel, sdist = tmp_path / f"glassformer-{VERSION}-py3-none-any.whl", tmp_path / "glassformer.tar.gz"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in release.tracked_data() - set(lacking):
                archive.writestr(f"glassformer/{name}", "")
        with tarfile.open(sdist, "w:gz") as archive:
            for name in {"pyproject.toml", "README.md", "LICENSE"} - set(lacking):
                archive.add(release.ROOT / name, f"glassformer-{VERSION}/{name}")
        return list(release.problems_of(wheel, sdist))

    return write


def test_whole_archives_have_no_problem_and_versions_agree(archives):
    assert archives() == []


def test_a_missing_file_is_named(archives):
    (first, second) = archives(["studio/static/index.html"])
    assert "such as studio/static/index.html" in first
    assert second == "the wheel lacks studio/static/index.html"
    assert archives(["LICENSE"]) == ["the sdist lacks LICENSE"]


def test_every_kind_of_data_file_is_packed_by_the_settings():
    """A kind that pyproject.toml does not list would be missing in the wheel."""
    patterns = tomllib.loads((release.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = release.ROOT / "src" / "glassformer"
    packed = {n for pattern in patterns["glassformer"] for n in glob.glob(pattern, root_dir=package, recursive=True)}
    assert {name for name in release.tracked_data() if (package / name).exists()} <= packed


def test_this_python_is_tried():
    assert release.interpreters()
    assert release.interpreters(["/opt/python3.99"])[-1] == "/opt/python3.99"


def test_a_python_of_pyenv_is_tried_and_a_shim_that_runs_nothing_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "VERSIONS", ("9.8", "9.9"))
    shims, real = tmp_path / "shims", tmp_path / "versions" / "9.9.1" / "bin"
    for folder, code in ((shims, 127), (real, 0)):
        folder.mkdir(parents=True)
        (folder / "python9.9").write_text(f"#!/bin/sh\nexit {code}\n")
        (folder / "python9.9").chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(shims))
    assert release.interpreters() == [sys.executable, str(real / "python9.9")]


def test_commands_that_fail_or_warn_are_reported(tmp_path):
    """Exit code, silence and a warning are three problems."""
    variables = {"PATH": "/usr/bin:/bin"}
    assert list(release.run([["echo", "hello"]], tmp_path, variables)) == []
    commands = [["false"], ["true"], ["sh", "-c", "echo UserWarning: old >&2"]]
    first, second, third = release.run(commands, tmp_path, variables)
    assert first.startswith("false ended with 1")
    assert second.startswith("true ended with 0")
    assert "printed a warning: UserWarning: old" in third


def test_a_server_that_ends_is_reported(tmp_path):
    program = tmp_path / "glass"
    program.write_text("#!/bin/sh\necho no studio >&2\nexit 2\n")
    program.chmod(0o755)
    assert list(release.ask_server(tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin"})) == [
        "glass serve does not answer: no studio"
    ]
