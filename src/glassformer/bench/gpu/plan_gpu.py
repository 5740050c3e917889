"""The rates of one GPU as they stand in `glassformer.sizing.devices`, and `glass size plan` against its clock.

    PYTHONPATH=src python -m glassformer.bench.gpu.plan_gpu

A captured step of GPT-2 124M, 64 x 1024 tokens, is profiled. Its kernels are sorted by name into products, attention
and the rest, which is pointwise work and the optimizer; what the plan counts of each, divided by its time, is its rate,
and what the clock shows beyond the kernels is the gaps. With these rates the plan then predicts steps of 12, 32 and 64
sequences; only the last was looked at. The residual stream is float32, whose bytes are those that the plan counts.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from glassformer.bench.gpu.train_gpu import CONTEXT, USED, VOCAB, measure, ours
from glassformer.config import presets
from glassformer.sizing.devices import H200, Device
from glassformer.sizing.parameters import count
from glassformer.sizing.plan import STEP, plan, work
from glassformer.training.objective import Batch

PROFILED, CHECKED = 64, (64, 32, 12)
CONFIG = presets.gpt2(vocab_size=VOCAB)
NAMES = {
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    "products": ("nvjet", "gemm", "xmma", "cutlass", "splitkreduce"),
}
"""Parts of the names of kernels, sought in this order; what has none of them is pointwise or the optimizer."""
Seconds = dict[str, float]


def kind_of(kernel: str) -> str:
    found = (kind for kind, parts in NAMES.items() if any(part in kernel.lower() for part in parts))
    return next(found, "rest")


def rates(kernels: Seconds, clock: float, batch: int, base: Device) -> Device:
    """`base` with the rates that explain a step: seconds of its kernels by kind, and by the clock."""
    whole = work(CONFIG, CONTEXT)
    return replace(
        base,
        matmuls=batch * whole.matmuls / kernels["products"],
        attention=batch * whole.attention / kernels["attention"],
        memory=(batch * whole.moved + STEP * count(CONFIG)) / kernels["rest"],
        gaps=max(0.0, clock - sum(kernels.values())),
    )


def batch_of(rows: int) -> Batch:
    ids = torch.randint(0, USED, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(torch.device("cuda"))


def profiled(step: Callable[[Batch], Any], batch: Batch, steps: int = 3) -> Seconds:
    """Seconds of a step's kernels by kind."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step(batch)
        torch.cuda.synchronize()
    found = dict.fromkeys((*NAMES, "rest"), 0.0)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[kind_of(event.name)] += event.time_range.elapsed_us() / 1e6 / steps
    return found


def show(device: Device, kernels: Seconds, clock: float) -> None:
    told = ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in kernels.items())
    print(f"{torch.cuda.get_device_name()}: {told}; {1e3 * clock:.1f} ms by the clock")
    print(
        f"    matmuls={device.matmuls / 1e12:.0f}e12, attention={device.attention / 1e12:.0f}e12, "
        f"memory={device.memory / 1e12:.2f}e12, capacity={device.capacity / 2**30:.0f} * 2**30, "
        f"gaps={1e3 * device.gaps:.1f}e-3,",
        flush=True,
    )


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    device = replace(H200, capacity=float(torch.cuda.mem_get_info()[1]))
    for rows in CHECKED:
        batch, (step, _) = batch_of(rows), ours(rows, "float32")
        measure(step, [batch], 5)  # compiles and captures
        clock = statistics.median(measure(step, [batch], 10)[0] for _ in range(3))
        if rows == PROFILED:
            kernels = profiled(step, batch)
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
