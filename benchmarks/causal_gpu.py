"""The gradient of causal attention on a Hopper GPU: cuDNN's and ours (train/causal.py), in turns, at several sizes.

    PYTHONPATH=src python -m benchmarks.causal_gpu [--energy]

Heads of 64 numbers in bfloat16. `busy`: the share of blocks that have a head; ours is used from causal.BUSY on.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.energy import repeated
from glassformer.train import causal, hopper

SIZES = (
    *((batch, 1024, 12) for batch in (64, 32, 22, 16, 12, 11, 8)),
    *((batch, time, 12) for batch, time in ((512, 128), (256, 256), (128, 512), (32, 2048), (16, 4096))),
    (64, 1024, 6),
)
"""Batch, time, heads."""


def contenders(batch: int, time: int, heads: int) -> dict[str, Callable[[], object]]:
    given = torch.randn(batch, time, 3 * heads * 64, device="cuda").bfloat16()
    d_out = torch.randn(batch, time, heads * 64, device="cuda").bfloat16()
    out, logs = causal.forward([given], heads, 0.125)
    q, k, v = (t.unflatten(-1, (heads, 64)).transpose(1, 2).detach().requires_grad_() for t in given.chunk(3, -1))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    d_o = d_out.unflatten(-1, (heads, 64)).transpose(1, 2)
    return {
        "cuDNN": partial(torch.autograd.grad, o, (q, k, v), d_o, retain_graph=True),
        "ours": partial(causal.backward, [given], out, logs, d_out, heads, 0.125),
    }


def in_turns(parts: dict[str, Callable[[], object]], rounds: int = 5, repeats: int = 8) -> dict[str, float]:
    """Milliseconds of each, the median."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            part()
            begin.record()
            for _ in range(repeats):
                part()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--energy", action="store_true", help="also joules, at the first size")
    energy = parser.parse_args().energy
    print(f"{'batch':>6}{'time':>6}{'heads':>6}{'busy':>8}{'cuDNN ms':>10}{'ours ms':>10}{'ratio':>8}")
    for batch, time, heads in SIZES:
        parts = contenders(batch, time, heads)
        ms = in_turns(parts)
        count, blocks = batch * heads, hopper.blocks()
        busy = count / (blocks * -(-count // blocks))
        print(
            f"{batch:>6}{time:>6}{heads:>6}{busy:>8.0%}{ms['cuDNN']:>10.3f}{ms['ours']:>10.3f}"
            f"{ms['cuDNN'] / ms['ours']:>8.2f}",
            flush=True,
        )
        if energy and (batch, time, heads) == SIZES[0]:
            for name, part in parts.items():
                seconds, joules, said = repeated(part)
                print(f"{name:>8}{1000 * seconds:>9.3f} ms {joules:>8.3f} J   {said}", flush=True)


if __name__ == "__main__":
    main()
