"""Products with GELU on a Hopper GPU, there and back: cuBLASLt's and ours (kernels/cuda/training/gelu.py), in turns, at several sizes.

    PYTHONPATH=src python -m glassformer.bench.gpu.gelu_gpu [--energy]

cuBLASLt keeps the argument of GELU and takes the slope from it on the way back; ours keeps the slope. The weight that
ours wants turned for that is turned each time. In bfloat16; `used`: whether training takes ours at this size.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from glassformer.bench.gpu.causal_gpu import REPEATS, captured, in_turns
from glassformer.bench.gpu.energy import numbers, repeated
from glassformer.kernels.cuda.training import gelu
from glassformer.kernels.toolchain import cublas

SIZES = (
    *((rows, 768, 3072) for rows in (65536, 16384, 12288, 4096, 2048)),
    *((rows, 384, 1536) for rows in (65536, 16384, 8192, 4096)),
    (16384, 1024, 4096),
    (8192, 1600, 6400),
)
"""Rows, width, hidden width."""


def contenders(rows: int, width: int, hidden: int) -> dict[str, torch.cuda.CUDAGraph]:
    x, up, down = numbers(rows, width), numbers(hidden, width, size=0.02), numbers(width, hidden, size=0.02)
    dy, pre = numbers(rows, width, size=1e-4), numbers(rows, hidden)
    slope = gelu.gelu_product(x, up, None)[1]
    parts: dict[str, Callable[[], object]] = {
        "cuBLASLt there": partial(cublas.multiply, x, up, False, True, None, finish="gelu", kept=pre),
        "ours there": partial(gelu.gelu_product, x, up, None),
        "cuBLASLt back": partial(cublas.multiply, dy, down, finish="gelu_slope", kept=pre),
        "ours back": lambda: gelu.slope_product(dy, down.T.contiguous(), slope),
    }
    return {name: captured(part, torch.cuda.Stream()) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--energy", action="store_true", help="also joules, at the first size")
    energy = parser.parse_args().energy
    print("  rows width hidden used   there: cuBLASLt, ours   back: cuBLASLt, ours (ms)   both, ratio")
    for rows, width, hidden in SIZES:
        parts = contenders(rows, width, hidden)
        ms = in_turns(parts)
        used = "yes" if gelu.suits(numbers(rows, width), numbers(hidden, width)) else "no"
        library, mine = ms["cuBLASLt there"] + ms["cuBLASLt back"], ms["ours there"] + ms["ours back"]
        each = "".join(f"{ms[name]:>10.3f}" for name in parts)
        print(f"{rows:>6}{width:>6}{hidden:>7}{used:>5}{each}{library / mine:>8.2f}", flush=True)
        if energy and (rows, width, hidden) == SIZES[0]:
            for name, graph in parts.items():
                seconds, joules, said = repeated(graph.replay)
                print(f"{name:>16}{1000 * seconds / REPEATS:>9.3f} ms {joules / REPEATS:>8.3f} J   {said}", flush=True)


if __name__ == "__main__":
    main()
