"""Matmuls fused with GELU on a Hopper GPU, forward and backward: cuBLASLt and our kernel (gelu.py) in turns.

    PYTHONPATH=src python -m glassformer.bench.gpu.gelu_gpu [--energy]

cuBLASLt stores the argument of GELU and computes the derivative from it in the backward pass; ours stores the
derivative. Our backward pass needs the transposed weight, and transposing it is part of the time. All in bfloat16.
`used` tells whether training uses our kernel at this size.
"""

from collections.abc import Callable
from functools import partial

import torch

from glassformer.bench.gpu.causal_gpu import REPEATS, captured, in_turns
from glassformer.bench.gpu.device import parser, require_gpu
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
        "cuBLASLt forward": partial(cublas.multiply, x, up, False, True, None, finish="gelu", kept=pre),
        "ours forward": partial(gelu.gelu_product, x, up, None),
        "cuBLASLt backward": partial(cublas.multiply, dy, down, finish="gelu_slope", kept=pre),
        "ours backward": lambda: gelu.slope_product(dy, down.T.contiguous(), slope),
    }
    return {name: captured(part, torch.cuda.Stream()) for name, part in parts.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--energy", action="store_true", help="Also measure energy in joules, at the first size.")
    energy = options.parse_args().energy
    require_gpu()
    print("  rows width hidden used   forward: cuBLASLt, ours   backward: cuBLASLt, ours (ms)   ratio of both")
    for rows, width, hidden in SIZES:
        parts = contenders(rows, width, hidden)
        ms = in_turns(parts)
        used = "yes" if gelu.suits(numbers(rows, width), numbers(hidden, width)) else "no"
        library, mine = ms["cuBLASLt forward"] + ms["cuBLASLt backward"], ms["ours forward"] + ms["ours backward"]
        each = "".join(f"{ms[name]:>10.3f}" for name in parts)
        print(f"{rows:>6}{width:>6}{hidden:>7}{used:>5}{each}{library / mine:>8.2f}", flush=True)
        if energy and (rows, width, hidden) == SIZES[0]:
            for name, graph in parts.items():
                seconds, joules, power = repeated(graph.replay)
                print(f"{name:>18}{1000 * seconds / REPEATS:>9.3f} ms {joules / REPEATS:>8.3f} J   {power}", flush=True)


if __name__ == "__main__":
    main()
