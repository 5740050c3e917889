"""Annotations vanish where jaxtyping is missing, and bite where it is there."""

import subprocess
import sys

import pytest
import torch

from glassformer.model.positions import sinusoids


def test_engine_imports_and_runs_without_the_packages_a_gpu_machine_lacks():
    code = """
import sys
for name in ("jaxtyping", "tyro", "rich", "matplotlib", "platformdirs", "sympy.physics"):
    sys.modules[name] = None
import torch, glassformer as gf
model = gf.build(gf.presets.nano())
print(len(gf.generate(model, [[1, 2]], 3)[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "5", done.stderr


def test_wrong_shapes_are_caught_in_the_tests():
    with pytest.raises(Exception, match="positions"):
        sinusoids("three", 4, None)
    with pytest.raises(Exception, match="Type-check error"):
        sinusoids(torch.tensor([0.5]), 4, None)  # a float position where whole numbers are declared
