"""What all verbs share: usage errors, being a module, a reader who goes away."""

import subprocess
import sys

from tests.cli.asking import run


def test_wrong_usage_is_exit_2(capsys):
    assert run(capsys, "paint")[0] == 2
    assert run(capsys, "size")[0] == 2
    assert run(capsys, "size", "gpt2", "--batch", "many")[0] == 2


def test_module_and_broken_pipe():
    """`python -m glassformer` is `glass`, and a reader that leaves early is no error."""
    command = f"{sys.executable} -m glassformer size gpt2 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
