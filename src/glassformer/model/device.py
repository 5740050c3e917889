"""Which device and dtype a command uses, how fast it multiplies matrices, and how a process prepares for training.

The choice is a function of the call and of what the machine can do (its GPU, its processor's instructions), never of a
timing: a busy moment must not change the dtype of a run. Timings are only reported.
"""

import contextlib
import ctypes
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from glassformer.config.choices import Device

DEVICES = get_args(Device)
WIDE = 256
"""Model width from which training on a CPU gains from bfloat16: below it, the casts cost more than the matmuls save."""
BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Processor flags of bfloat16 instructions (x86 matrix and vector units, Arm). Without them bfloat16 is emulated."""


@dataclass(frozen=True)
class Choice:
    """A device and a dtype to compute in, and why."""

    device: str
    dtype: torch.dtype
    why: str


def choose_device(wanted: str = "auto") -> str:
    """Return "cuda" or "cpu". `auto` is the GPU where there is one."""
    if wanted not in DEVICES:
        raise ValueError(f"device={wanted!r} is not known: use one of {', '.join(DEVICES)}.")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("device='cuda' was requested but no CUDA device is here: use 'auto' or 'cpu'.")
    return ("cuda" if available else "cpu") if wanted == "auto" else wanted


@contextlib.contextmanager
def opening_gpu() -> Iterator[None]:
    """Open the first GPU, if there is one, while the block runs: a third of a second for its driver and a context."""
    with ThreadPoolExecutor(1) as background:
        if torch.version.cuda is not None:
            background.submit(_open_gpu)  # its errors are those of the first use, which reports them
        yield


def _open_gpu() -> None:
    ctypes.CDLL("libcuda.so.1").cuInit(0)  # most of the time; torch would not let other threads run meanwhile
    torch.cuda.synchronize()


def bfloat16_support(device: str) -> tuple[bool, str]:
    """Whether matmuls in bfloat16 are faster than in float32 on this device, and the reason in words."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return native, f"{name} {'has' if native else 'has no'} bfloat16 tensor cores"
    found = [flag for flag in BFLOAT16_FLAGS if flag in processor_flags()]
    if found:
        return True, f"the processor has bfloat16 instructions ({found[0]})"
    return False, "the processor has no bfloat16 instructions"


def choose_for_training(device: str = "auto", precision: str = "auto", width: int = WIDE) -> Choice:
    """Return the device and the dtype of the matmuls of a training run whose model is `width` wide.

    A given precision is used. `auto` is bfloat16 where the device supports it; on a CPU only for models at least 256
    wide. `glass train` uses this choice and `glass env` prints it.
    """
    device = choose_device(device)
    if precision != "auto":
        return Choice(device, getattr(torch, precision), f"precision={precision!r} was requested")
    supported, why = bfloat16_support(device)
    if supported and device == "cpu" and width < WIDE:
        narrow = f"a model {width} wide trains faster in float32; from {WIDE} on, bfloat16 is used"
        return Choice(device, torch.float32, f"{why}, but {narrow}")
    return Choice(device, torch.bfloat16 if supported else torch.float32, why)


AGREE = 0.1
"""The best three rounds of a measurement must agree within this fraction: otherwise other work disturbed all rounds."""
BEST = 3
SHARE = 0.6
"""Least CPU time of the fastest round as a fraction of its wall time on one core. Below it the process had to wait for
a core: on a busy machine all rounds can last the same few time slices of the scheduler, and then agree."""
SECONDS = 1.0
"""Time limit of one measurement, per dtype."""


@dataclass(frozen=True)
class Throughput:
    """Measured matmul throughput."""

    gflops: float
    """Of the fastest round."""
    size: int
    rounds: int
    disturbed: bool
    """True if the fastest rounds do not agree or had to wait for a core: the number is then only a lower bound."""


def measure_throughput(
    device: str,
    dtype: torch.dtype,
    size: int = 1024,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
) -> Throughput:
    """Measure matmuls of size x size until the best three rounds agree within 10 %, or a second has passed.

    Where the processor emulates a dtype, one matmul of 1024 x 1024 can take seconds: a smaller one is then measured.
    """
    began = clock()
    while size > 128 and 8 * _round(_operand(device, dtype, size // 2), clock) > SECONDS / (2 * BEST):
        size //= 2
        if clock() - began > SECONDS:
            break
    a = _operand(device, dtype, size)
    _round(a, clock)  # warm-up
    began, times, shares = clock(), list[float](), list[float]()
    while True:
        used = cpu_clock()
        times.append(_round(a, clock))
        shares.append((cpu_clock() - used) / max(times[-1], 1e-9))
        best = sorted(times)[:BEST]
        agree = len(times) > BEST and best[-1] <= (1 + AGREE) * best[0]
        agree = agree and (device != "cpu" or shares[times.index(best[0])] >= SHARE)
        if agree or (len(times) >= BEST and clock() - began > SECONDS):
            return Throughput(2 * size**3 / best[0] / 1e9, size, len(times), not agree)


def measure_matmul(device: str, dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """Return GFLOP/s of a size x size matmul: 2 size³ operations over the best of a few timings."""
    a = _operand(device, dtype, size)
    times = [_round(a, time.perf_counter) for _ in range(repeats + 1)]  # the first one warms up
    return 2 * size**3 / min(times) / 1e9


def _round(a: torch.Tensor, clock: Callable[[], float]) -> float:
    """Seconds of one matmul."""
    if a.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    a @ a
    if a.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def _operand(device: str, dtype: torch.dtype, size: int) -> torch.Tensor:
    own = torch.Generator(device).manual_seed(0)  # the global generator may belong to a run that must be reproducible
    return torch.randn(size, size, generator=own, device=device).to(dtype)


def processor_flags() -> frozenset[str]:
    """Return the instruction sets that the system lists for its processor; empty where it lists none."""
    return frozenset(processor_description().split())


def processor_description() -> str:
    """Return the lines of /proc/cpuinfo that name the processor and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for its settings (mallopt(3))."""
LARGEST = 32 << 20
"""Largest size in bytes that comes from the heap; the largest that glibc allows."""


def keep_freed() -> bool:
    """Tell glibc to keep freed memory, which the next step needs again. Return False if there is no such setting.

    By default glibc returns freed memory to the system, and every step maps and clears thousands of pages again: a
    sixth of the time of a bfloat16 step with 10 million parameters on a CPU.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
