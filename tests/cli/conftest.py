"""A model folder for tests of the command line."""

import pytest

from tests import folders


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny model of 300 tokens with its tokenizer. Tests that change it copy it first."""
    return folders.write(tmp_path_factory.mktemp("model") / "tiny")
