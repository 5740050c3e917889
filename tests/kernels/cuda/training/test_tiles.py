"""What is said of tiles in Python is what the kernels are compiled with. The kernels: test_exponentials, test_gelu."""

import re

from glassformer.kernels.cuda.training import tiles


def test_sizes_are_the_kernels():
    text = tiles.source("gelu.cu", 768, BIASED=1)
    found = dict(re.findall(r"^#define (\w+) (\d+)\b", text, re.M))
    wanted = {"TILE": tiles.TILE, "THREADS": tiles.THREADS, "STAGES": tiles.STAGES, "DEPTH": 768, "BIASED": 1}
    assert {name: int(found[name]) for name in wanted} == wanted
    step, bytes_of_two = int(found["STEP"]), 2
    assert tiles.STAGES * 2 * tiles.TILE * bytes_of_two * step == tiles.RING
    assert tiles.RING + 2 * tiles.BOARD <= 227 * 1024 - 1024  # what a block may have, less what the code declares
