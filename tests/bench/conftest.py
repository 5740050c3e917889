"""Fixtures of the benchmark's tests."""

import sys
from pathlib import Path

import pytest

from glassformer.bench import processes
from tests.bench import tiny


@pytest.fixture(scope="session")
def subject(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return tiny.write_encoder(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def seq2seq(tmp_path_factory):
    return tiny.write_seq2seq(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def fake_processes(monkeypatch):
    """Processes that speak the protocol and load nothing."""
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, str(Path(__file__).parent / "fake_worker.py")])


@pytest.fixture
def clean_imports(monkeypatch):
    """A checkout's modules have common names: they are forgotten afterwards, and the path with them."""
    names = ("model", "generate", "quantize", "tokenizer")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in names:
        sys.modules.pop(name, None)
