"""`size` and `generate` are modules and functions at once, in whatever order they are imported."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "first",
    ["import glassformer.size, glassformer.generate", "from glassformer.size import count"],
)
def test_both_readings_of_the_name_hold(first):
    code = f"""
{first}
import glassformer as gf
assert gf.size(gf.presets.nano()).to_dict()
assert gf.size.count(gf.presets.gpt2()) == 124_439_808
model = gf.build(gf.presets.nano())
assert gf.generate(model, [[1]], 2) == gf.generate.generate(model, [[1]], 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
