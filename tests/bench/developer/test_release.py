"""The check of a release sees what an archive lacks."""

import glob
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
    assert release.tracked_data() <= packed


def test_this_python_is_tried():
    assert release.interpreters()
    assert release.interpreters(["/opt/python3.99"])[-1] == "/opt/python3.99"
