"""What all verbs share: usage errors, being a module, a reader who goes away."""

import subprocess
import sys

import glassformer as gf
from tests.cli.asking import run


def test_wrong_usage_is_exit_2(capsys):
    assert run(capsys, "paint")[0] == 2
    assert run(capsys, "size")[0] == 2
    assert run(capsys, "size", "gpt2", "--batch", "many")[0] == 2


def test_the_version_is_told(capsys):
    assert run(capsys, "--version") == (0, f"glassformer {gf.__version__}\n", "")


def test_an_error_of_the_system_names_its_path_and_a_remedy(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "there/x")

    monkeypatch.setattr("glassformer.size.size", full)
    code, out, err = run(capsys, "size", "gpt2")
    assert (code, out) == (2, "")
    assert err == "glass: there/x cannot be used (No space left on device): give another path, or mend this one.\n"


def test_module_and_broken_pipe():
    """`python -m glassformer` is `glass`, and a reader that leaves early is no error."""
    command = f"{sys.executable} -m glassformer size gpt2 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
