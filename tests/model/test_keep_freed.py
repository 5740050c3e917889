"""Freed memory is kept: the same tensors, step after step, touch no fresh page."""

import ctypes
import os
import subprocess
import sys

import pytest

from glassformer.model import device as memory

FAULTS = """
import resource, sys, torch
from glassformer.model.device import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
def step():
    held = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.slow
@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_steps_map_no_fresh_pages():
    def faults(how: str) -> int:
        run = [sys.executable, "-c", FAULTS, how]
        # by itself glibc learns from what is freed, more or less: here every tensor has pages of its own
        alone = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
        return int(subprocess.run(run, capture_output=True, text=True, check=True, env=alone).stdout)

    pages = 5 * 8 * (4 << 20) // 4096  # of all tensors of five steps
    assert faults("keep") < pages / 100
    assert faults("leave") > pages / 10  # or there is nothing to gain here


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_freed()
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed()
