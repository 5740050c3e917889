"""Measure the throughputs of one GPU for `sizing/devices.py`, and compare `glass size plan` with measured steps.

    PYTHONPATH=src python -m glassformer.bench.gpu.plan_gpu

A captured step of GPT-2 124M, 64 x 1024 tokens, is profiled. Its kernels are sorted by name into matmuls, attention
and the rest (pointwise operations and the optimizer). The work that the plan counts for each, divided by its time, is
the throughput; the time of the step beyond its kernels is the gaps. With these throughputs the plan predicts steps of
12, 32 and 64 sequences, of which only the last was profiled. The residual stream is float32, as the plan assumes.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from glassformer.bench.commands import parser, random_batch
from glassformer.bench.gpu.device import gpu_seconds, require_gpu
from glassformer.config import presets
from glassformer.sizing.devices import H200, Device
from glassformer.sizing.parameters import count
from glassformer.sizing.plan import STEP, plan, work
from glassformer.training.graph import CapturedStep
from glassformer.training.loop import prepare_state
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

PROFILED, CHECKED = 64, (64, 32, 12)
CONTEXT, VOCAB, USED = 1024, 50304, 512
CONFIG = presets.gpt2(vocab_size=VOCAB, dropout=0.0)
NAMES = {
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    "products": ("nvjet", "gemm", "xmma", "cutlass", "splitkreduce"),
}
"""Substrings of kernel names, searched in this order. Kernels with none of them are pointwise or the optimizer's."""
Seconds = dict[str, float]


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    found = (kind for kind, parts in NAMES.items() if any(part in kernel.lower() for part in parts))
    return next(found, "rest")


def rates(kernels: Seconds, clock: float, batch: int, base: Device) -> Device:
    """Return `base` with the throughputs that explain a step: seconds of its kernels by kind, and of the whole step."""
    whole = work(CONFIG, CONTEXT)
    return replace(
        base,
        matmuls=batch * whole.matmuls / kernels["products"],
        attention=batch * whole.attention / kernels["attention"],
        memory=(batch * whole.moved + STEP * count(CONFIG)) / kernels["rest"],
        gaps=max(0.0, clock - sum(kernels.values())),
    )


def step_of(rows: int) -> Callable[[], Any]:
    """Return our training step on one batch of that many sequences, captured as a CUDA graph."""
    run = Run(
        model=CONFIG,
        optim=Optim(lr=6e-4),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100_000, batch=rows),
        machine=Machine(device="cuda", precision="bfloat16", stream="float32", compile="yes"),
    )
    state, batch = prepare_state(run), random_batch(rows, CONTEXT, USED, device="cuda")
    step = CapturedStep(state)
    return lambda: step(state, batch)


def seconds_per_step(step: Callable[[], Any], steps: int) -> float:
    return gpu_seconds(lambda: [step() for _ in range(steps)]) / steps


def profiled(step: Callable[[], Any], steps: int = 3) -> Seconds:
    """Return the seconds of a step's kernels by kind."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = dict.fromkeys((*NAMES, "rest"), 0.0)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[kind_of(event.name)] += event.time_range.elapsed_us() / 1e6 / steps
    return found


def show(device: Device, kernels: Seconds, clock: float) -> None:
    parts = ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in kernels.items())
    print(f"{torch.cuda.get_device_name()}: {parts}; {1e3 * clock:.1f} ms in all")
    print(
        f"    matmuls={device.matmuls / 1e12:.0f}e12, attention={device.attention / 1e12:.0f}e12, "
        f"memory={device.memory / 1e12:.2f}e12, capacity={device.capacity / 2**30:.0f} * 2**30, "
        f"gaps={1e3 * device.gaps:.1f}e-3,",
        flush=True,
    )


def main() -> None:
    parser(__doc__).parse_args()
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    device = replace(H200, capacity=float(torch.cuda.mem_get_info()[1]))
    for rows in CHECKED:
        step = step_of(rows)
        seconds_per_step(step, 5)  # compiles and captures
        clock = statistics.median(seconds_per_step(step, 10) for _ in range(3))
        if rows == PROFILED:
            kernels = profiled(step)
            device = rates(kernels, clock, rows, device)
            show(device, kernels, clock)
        predicted = plan(CONFIG, 1, device, "data", rows, CONTEXT).step
        print(
            f"batch {rows}: predicted {1e3 * predicted:.1f} ms, measured {1e3 * clock:.1f} ms "
            f"({rows * CONTEXT / clock:,.0f} tokens/s): {predicted / clock - 1:+.1%}",
            flush=True,
        )
        del step
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
