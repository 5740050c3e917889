"""The gradient of causal attention on a Hopper GPU: cuDNN and our kernel (causal.py) in turns, at several sizes.

    PYTHONPATH=src python -m glassformer.bench.gpu.causal_gpu [--energy]

Heads are 64 wide, in bfloat16. `busy` is the fraction of the GPU's thread blocks that have work; training uses our
kernel from causal.BUSY on (`used`). `parts` is the number of blocks that share one head in the last, incomplete
round.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from glassformer.bench.commands import in_turns, parser
from glassformer.bench.gpu.device import require_gpu
from glassformer.bench.gpu.energy import repeated
from glassformer.kernels.cuda.training import causal, hopper

SIZES = (
    *((batch, 1024, 12) for batch in (64, 32, 24, 16, 12, 8, 6, 4)),
    *((batch, time, 12) for batch, time in ((512, 128), (256, 256), (128, 512), (24, 512), (12, 512))),
    *((batch, time, 12) for batch, time in ((32, 2048), (16, 2048), (12, 2048), (8, 2048), (16, 4096))),
    (64, 1024, 6),
)
"""Batch, sequence length, heads."""
REPEATS = 8


def captured(part: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of REPEATS calls, whose replay does not wait for the host."""
    part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            part()
    return graph


def contenders(batch: int, time: int, heads: int) -> dict[str, torch.cuda.CUDAGraph]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # autograd runs the backward pass on the stream of the forward pass
        given = torch.randn(batch, time, 3 * heads * 64, device="cuda").bfloat16()
        d_out = torch.randn(batch, time, heads * 64, device="cuda").bfloat16()
        out, logs = causal.forward(list(given.chunk(3, -1)), heads, 0.125)
        q, k, v = (t.unflatten(-1, (heads, 64)).transpose(1, 2).detach().requires_grad_() for t in given.chunk(3, -1))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        d_o = d_out.unflatten(-1, (heads, 64)).transpose(1, 2)
        parts: dict[str, Callable[[], object]] = {
            "cuDNN": partial(torch.autograd.grad, o, (q, k, v), d_o, retain_graph=True),
            "ours": partial(causal.backward, list(given.chunk(3, -1)), out, logs, d_out, heads, 0.125),
        }
        return {name: captured(part, stream) for name, part in parts.items()}


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the milliseconds of one call, by the GPU's clock; an untimed replay comes first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--energy", action="store_true", help="Also measure energy in joules, at the first size.")
    energy = options.parse_args().energy
    require_gpu()
    print(" batch length heads parts  busy  used  cuDNN ms   ours ms   ratio")
    for batch, time, heads in SIZES:
        parts = contenders(batch, time, heads)
        times = in_turns({name: partial(milliseconds, graph) for name, graph in parts.items()}, rounds=5)
        ms = {name: statistics.median(found) for name, found in times.items()}
        _, split, busy = causal.shares(batch * heads, time, hopper.blocks())
        used = "yes" if causal.supports_call(batch, time, heads, causal.WIDTH, torch.device("cuda")) else "no"
        print(
            f"{batch:>6}{time:>7}{heads:>6}{split:>6}{busy:>6.0%}{used:>6}{ms['cuDNN']:>10.3f}{ms['ours']:>10.3f}"
            f"{ms['cuDNN'] / ms['ours']:>8.2f}",
            flush=True,
        )
        if energy and (batch, time, heads) == SIZES[0]:
            for name, graph in parts.items():
                seconds, joules, power = repeated(graph.replay)
                print(f"{name:>8}{1000 * seconds / REPEATS:>9.3f} ms {joules / REPEATS:>8.3f} J   {power}", flush=True)


if __name__ == "__main__":
    main()
