"""The command that runs the code of several ranks on one GPU; here on a CPU with gloo, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from glassformer.bench.gpu import ranks_gpu


@pytest.mark.slow
def test_one_rank_runs_every_kind_and_agrees_with_none(tmp_path):
    words = [sys.executable, "-m", "glassformer.bench.gpu.ranks_gpu", "--cpu", "--json", str(tmp_path / "found.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kinds"].keys() == ranks_gpu.KINDS.keys()
    assert all(one["passed"] for one in (*found["kinds"].values(), *found["train"].values()))
    assert {"no", "selective", "full"} < found["recompute"].keys()
    assert found["cost"]["none, eager"]["ratio"] == 1


def test_an_error_is_reported_and_the_rest_goes_on(capsys):
    report = ranks_gpu.Report(10)
    with report.errors("kinds", "ddp"):
        raise RuntimeError("out of\nmemory")
    report.line("kinds", "fsdp", True, "fine")
    assert report.failed == ["kinds ddp"]
    assert "RuntimeError: out of memory  FAILED" in capsys.readouterr().out
    assert report.found["kinds"]["fsdp"]["passed"]
