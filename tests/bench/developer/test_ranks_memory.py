"""The memory of one rank without devices: fake ranks against real ones, and the plan against both."""

import os
import subprocess
import sys

import pytest

from glassformer.bench.developer import ranks_memory

NEAR = 0.05
"""The plan is this close to the peak of a rank of a small model; docs/ranks.md has the figures."""


@pytest.mark.slow
def test_fake_and_real_ranks_have_the_same_peak_and_the_plan_is_near():
    words = [sys.executable, "-m", "glassformer.bench.developer.ranks_memory", "--cases", "small", "--gloo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if " peak " in line]
    assert len(lines) == 2 * len(ranks_memory.cases()["small"])
    for fake, real in zip(lines[::2], lines[1::2], strict=True):
        at = fake.index("peak") + 1
        assert float(fake[at]) == pytest.approx(float(real[at]), rel=0.02), fake
        error = fake[fake.index("planned") + 2].strip("()%")
        assert abs(float(error)) <= 100 * NEAR, fake
