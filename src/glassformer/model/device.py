"""Which device and which precision, decided by measurement, with the reason in words.

bfloat16 is chosen where a matrix product in it is measured to be clearly faster than in float32; that is so on recent
GPUs and on CPUs with bf16 instructions, and is not on others, which only emulate it.
"""

import time
from dataclasses import dataclass

import torch

CLEARLY_FASTER = 1.3
"""bf16 loses 16 of 24 bits: a gain within the noise of a timing is not worth them."""
PATIENCE = 3.0
"""Seconds that measuring one dtype may take."""


@dataclass(frozen=True)
class Choice:
    """A device and a dtype to compute in, and why."""

    device: str
    dtype: torch.dtype
    why: str
    gflops: dict[str, float]
    """Measured rate of a square matrix product, per dtype."""


def choose_device(size: int = 1024) -> Choice:
    """Measure and choose. Takes 0.1 to 0.3 s on a CPU."""
    if torch.cuda.is_available():
        device, name = "cuda", torch.cuda.get_device_name()
        size = 4096
    else:
        threads = torch.get_num_threads()
        device, capability = "cpu", torch.backends.cpu.get_cpu_capability()
        name = f"CPU, {threads} thread{'s' * (threads > 1)}, {capability}"
    rates = {"float32": measure_matmul(device, torch.float32, size)}
    if device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        rates["bfloat16"] = measure_matmul(device, torch.bfloat16, size)
    gain = rates.get("bfloat16", 0.0) / rates["float32"]
    rate_words = " and ".join(f"{rate:,.0f} GFLOP/s in {kind}" for kind, rate in rates.items())
    measured = f"products of up to {size} x {size} run at {rate_words}"
    if gain >= CLEARLY_FASTER:
        return Choice(device, torch.bfloat16, f"{name}: {measured}: {gain:.1f} times faster in bfloat16.", rates)
    reason = "bfloat16 is not clearly faster" if "bfloat16" in rates else "the device has no bfloat16"
    return Choice(device, torch.float32, f"{name}: {measured}: {reason}.", rates)


def measure_matmul(device: str, dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """GFLOP/s of a size³ product: 2 size³ operations over the best of a few timings.

    A processor that has to emulate a dtype would take many seconds (2 for each product of 1024 in bfloat16, seen on one
    with AVX2). Where a product of an eighth of the size says so, its rate is the answer.
    """
    small = _best_time(device, dtype, size // 8, 2) if size >= 1024 else 0.0
    if (repeats + 1) * 8**3 * small > PATIENCE:
        return 2 * (size // 8) ** 3 / small / 1e9
    return 2 * size**3 / _best_time(device, dtype, size, repeats) / 1e9


def _best_time(device: str, dtype: torch.dtype, size: int, repeats: int) -> float:
    own = torch.Generator().manual_seed(0)  # the global one may belong to a run that must repeat
    a = torch.randn(size, size, generator=own).to(device, dtype)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one warms up
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
