"""Energy of the parts of a training step of GPT-2 124M on a GPU, each repeated alone until the clock is steady.

    PYTHONPATH=src python -m glassformer.bench.gpu.energy

A batch of 64 x 1024 tokens, in bf16. The last column is joules for the whole step: all its matmuls by their number of
operations, at the mean of the three measured here, and attention times its twelve layers.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from glassformer.bench.commands import parser
from glassformer.bench.gpu.device import require_gpu
from glassformer.bench.gpu.power import Meter

ROWS, WIDTH, HIDDEN, LAYERS = 65536, 768, 3072, 12
OPERATIONS = 4.86e13
"""FLOPs of all matmuls of a step: 6 per token for each of 85 million weights of the blocks and 38.6 of the head."""
STEADY, MEASURED = 0.4, 0.8
"""Seconds before the clock is taken to be steady, and seconds measured."""


def repeated(part: Callable[[], object]) -> tuple[float, float, str]:
    """Return seconds and joules of one call, and the power and clock as text."""
    meter, start, count = Meter(), time.perf_counter(), 0
    while time.perf_counter() - start < STEADY:
        part()
    torch.cuda.synchronize()
    meter.begin()
    start = time.perf_counter()
    while time.perf_counter() - start < MEASURED:
        for _ in range(4):
            part()
        count += 4
        torch.cuda.synchronize()
        meter.look()
    meter.end()
    return (time.perf_counter() - start) / count, meter.joules / count, meter.text()


def numbers(*shape: int, size: float = 1.0) -> torch.Tensor:
    """Return random bfloat16 numbers of standard deviation `size` on the GPU."""
    return (torch.randn(shape, device="cuda") * size).bfloat16()


def main() -> None:
    parser(__doc__).parse_args()
    require_gpu()
    x, hidden = numbers(ROWS, WIDTH), numbers(ROWS, HIDDEN)
    up, down = numbers(HIDDEN, WIDTH, size=0.05), numbers(WIDTH, HIDDEN, size=0.05)
    matmuls: dict[str, Callable[[], object]] = {
        "up": partial(F.linear, x, up),
        "down": partial(F.linear, hidden, down),
        "gradient of up": partial(torch.mm, hidden.T, x),
    }
    q, k, v = (numbers(64, 1024, 12, 64).transpose(1, 2).requires_grad_() for _ in range(3))

    def attention() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = attention()
    backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
    source, target = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    others: dict[str, Callable[[], object]] = {
        "up, of zeros": partial(F.linear, torch.zeros_like(x), up),
        "up, equal tokens": partial(F.linear, x[:1].expand(ROWS, WIDTH).contiguous(), up),
        "up, 4 bits fewer": partial(F.linear, (x.view(torch.int16) & ~15).view(x.dtype), up),
        "up, swapped operands": partial(F.linear, up, x),
        "copy of 1 GiB": partial(target.copy_, source),
        "idle": partial(time.sleep, 0.01),
    }
    step = []
    parts = matmuls | {"attention": attention, "its gradient": backward} | others
    for name, part in parts.items():
        seconds, joules, power = repeated(part)
        share = OPERATIONS / 3 / (2 * ROWS * WIDTH * HIDDEN) if name in matmuls else LAYERS
        step += [] if name in others else [joules * share]
        whole = "" if name in others else f"{step[-1]:6.1f} J per step"
        print(f"{name:<22}{1000 * seconds:>9.3f} ms {joules:>8.3f} J   {power}   {whole}", flush=True)
    print(f"matmuls and attention of a step: {sum(step):.1f} J, which takes {sum(step) / 0.7:.1f} ms at 700 W")


if __name__ == "__main__":
    main()
