"""`size` and `generate` are modules and functions at once, in whatever order they are imported."""

import subprocess
import sys

ORDERS = """
import sys

def hold():
    import glassformer as gf
    assert gf.size(gf.presets.nano()).to_dict()
    assert gf.size.count(gf.presets.gpt2()) == 124_439_808
    model = gf.build(gf.presets.nano())
    assert gf.generate(model, [[1]], 2) == gf.generate.generate(model, [[1]], 2)

for first in ("import glassformer.sizing, glassformer.generate", "from glassformer.sizing import count"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "glassformer"]:
        del sys.modules[name]  # as in a process just started, but for torch
    exec(first)
    hold()
"""


def test_both_readings_of_the_name_hold():
    done = subprocess.run([sys.executable, "-c", ORDERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
