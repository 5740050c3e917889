"""The straight path, traced in a process of its own: a profiler must not meet the threads of other tests."""

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("straight_path_checks.py")


def test_the_path_from_the_command_line_and_from_token_ids_to_attention_is_short():
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-s", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(words, cwd=CHECKS.parents[1], capture_output=True, text=True, timeout=240, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
