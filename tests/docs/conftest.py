"""The site, built once for the tests that look at it."""

import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture(scope="session")
def built_site(tmp_path_factory):
    """The folder of the site; a warning is an error."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder
