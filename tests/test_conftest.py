"""The summary of the suite: tests that were skipped for want of a program name the command that installs it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import TESTS, executes_annotations, pytest_terminal_summary
from tests.studio.page import INSTALL, REASON, find_chromium


def test_a_reason_that_names_a_command_is_one_line():
    lines = []
    reasons = ["Skipped: no Chromium was found: run x y", "Skipped: no Chromium was found: run x y", "Skipped: no CUDA"]
    skipped = [SimpleNamespace(longrepr=("file.py", 1, reason)) for reason in reasons]
    stats = {"skipped": [*skipped, SimpleNamespace(longrepr="another form")]}
    pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=lambda line, **_: lines.append(line)))
    assert lines == ["2 tests were skipped because no Chromium was found: run x y"]
    assert ": run " in REASON  # that of the tests of the page


def test_a_browser_that_is_named_is_taken_or_none(monkeypatch, tmp_path):
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "none"))
    assert find_chromium() is None
    (tmp_path / "mine").touch()
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "mine"))
    assert find_chromium() == tmp_path / "mine"


def test_the_browser_that_playwright_installs_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_chromium() is None
    made = tmp_path / ".cache/ms-playwright/chromium-1200/chrome-linux/chrome"
    made.parent.mkdir(parents=True)
    made.touch()
    assert find_chromium() == made


@pytest.mark.parametrize(
    ("path", "checked"),
    [
        ("test_shapes.py", True),
        ("model/test_cache.py", True),
        ("generation/test_beam.py", True),
        ("lens/figures/test_rank.py", True),
        ("lens/test_patch.py", True),
        ("generation/test_loop.py", False),
        ("lens/views/test_attention.py", False),
        ("doctor/test_diagnose.py", False),
    ],
)
def test_annotations_are_executed_by_the_tests_of_the_modules_that_have_them(path, checked):
    assert executes_annotations(TESTS / path) == checked


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_without_a_browser_the_suite_says_how_to_install_one(workers):
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "tests/studio/test_page_theory.py"]
    environment = {**os.environ, "CHROMIUM": "no/such/browser"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert f"skipped because no Chromium was found: run {INSTALL}" in done.stdout
