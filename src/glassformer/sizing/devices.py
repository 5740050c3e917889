"""Rates of devices and of the links between them, from which `plan` predicts the time of a training step.

The time of a training step on one device is the sum of five terms, each a count divided by a rate:

    matmuls    6 · weights · tokens FLOPs (forward and backward)                      / matmuls
    attention  3.5 · (scores and pattern·v under the mask): 2 matmuls forward, 5 back / attention
    pointwise  tokens · (L · (42·D + 13.4·F) + 7.5·V) bytes, F counted 1.5 times when gated   / memory
    optimizer  parameters · 50 bytes                                                  / memory
    gaps       a constant: kernel launches, partly filled last waves of kernels, the host

The five constants were measured on one H200: GPT-2 124M, 64 x 1024 tokens, compiled, bfloat16 matmuls with float32
weights (matmuls 65.3 ms, attention 17.3 ms, everything else 23.6 ms; 109.1 ms in total). Batches of 12 and 32 were held
out for validation.

To measure the rates again, after a change of kernels or for another device:

    matmuls, attention, memory, gaps, capacity
        python -m glassformer.bench.gpu.plan_gpu profiles that step, prints the values as they appear below, and
        validates them at batches of 12, 32 and 64.
    link, gather, scatter, latency
        python -m glassformer.bench.developer.plan measures them with two gloo ranks on the CPU. The links between GPUs
        were not measured; use the bus bandwidth that all_reduce_perf, all_gather_perf and reduce_scatter_perf of
        nccl-tests report.

Only the H200 was measured. The rates of the other devices are assumed: the figures of the data sheet, times the shares
that the H200 reaches of its own data sheet (`ASSUMED`). The output states this assumption.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from glassformer.errors import nearest


@dataclass(frozen=True)
class DataSheet:
    """Figures of a device as published by the vendor."""

    peak: float
    """Dense bfloat16 FLOP/s with float32 accumulation, without sparsity."""
    gigabytes: int
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    link: float
    """Bytes per second to the other devices of the machine, the sum of both directions."""
    link_kind: str
    watts: int
    """Maximum board power (TDP)."""
    document: str
    """Title of the data sheet."""


@dataclass(frozen=True)
class Device:
    """Rates of one device: FLOP/s, bytes/s, memory in bytes, links per device and direction."""

    name: str
    matmuls: float
    """FLOP/s of the matmuls of a training step."""
    attention: float
    """FLOP/s of the attention kernel, forward and backward."""
    memory: float
    """Memory bandwidth in bytes per second, reads and writes together."""
    capacity: float
    """Bytes of memory that a process can use."""
    peak: float
    """Dense bfloat16 FLOP/s of the data sheet, the reference for utilisation (MFU)."""
    gaps: float
    """Seconds per step that the rates do not account for."""
    link: float
    """Bytes per second to the other devices of the machine, in an all-reduce."""
    gather: float
    """Bytes per second in an all-gather. With NCCL rings this equals `link`; with gloo it does not."""
    scatter: float
    """Bytes per second in a reduce-scatter."""
    network: float
    """Bytes per second to other machines."""
    per_machine: int
    latency: float
    """Seconds until a message to another device starts to arrive."""
    overlap: float
    """Share of the backward pass (sharded: of forward and backward) that can overlap with communication. Near 1 if
    separate copy engines send the data, 0 if the processor that computes also copies."""
    source: str
    price: float | None = None
    """US dollars per device and hour. None: no cost is computed."""
    sheet: DataSheet | None = None
    measured: bool = True
    """False if the rates are assumed shares of the data sheet."""


H200 = Device(
    name="h200",
    matmuls=744e12, attention=250e12, memory=3.76e12, capacity=139 * 2**30, peak=990e12, gaps=2.9e-3,
    link=360e9, gather=360e9, scatter=360e9, network=40e9, per_machine=8, latency=10e-6, overlap=0.9,
    source="matmuls, attention, memory, capacity and gaps were measured on one H200 (docs/benchmarks_history.md); "
    "links are 80 % of the data sheet's 450 GB/s a direction (NVLink 4) and of an assumed network of 400 Gbit/s per "
    "device",
    sheet=DataSheet(990e12, 141, 4.8e12, 900e9, "NVLink 4", 700, "NVIDIA H200 Tensor Core GPU data sheet"),
)  # fmt: skip

ASSUMED = {
    "matmuls": H200.matmuls / 990e12,
    "attention": H200.attention / 990e12,
    "memory": H200.memory / 4.8e12,
    "link": 0.8,
}
"""Shares of the data sheet that a device without measurements is assumed to reach: those of the H200."""


def _assumed(name: str, sheet: DataSheet, network: float, per_machine: int = 8) -> Device:
    """Return a device that was not measured: the data sheet times ASSUMED.

    `network` is in Gbit/s per device to other machines.
    """
    link = sheet.link / 2 * ASSUMED["link"]
    return Device(
        name=name,
        matmuls=sheet.peak * ASSUMED["matmuls"],
        attention=sheet.peak * ASSUMED["attention"],
        memory=sheet.bandwidth * ASSUMED["memory"],
        capacity=sheet.gigabytes * 1e9,
        peak=sheet.peak,
        gaps=H200.gaps,
        link=link,
        gather=link,
        scatter=link,
        network=network / 8 * 1e9 * ASSUMED["link"],
        per_machine=per_machine,
        latency=H200.latency,
        overlap=H200.overlap,
        source=f"{sheet.document}. Not measured on this device: matmuls at {ASSUMED['matmuls']:.0%} of the peak, "
        f"attention at {ASSUMED['attention']:.0%} and memory at {ASSUMED['memory']:.0%} of its bandwidth are assumed, "
        f"as measured on an H200; {sheet.link_kind} and an assumed network of {network:g} Gbit/s per device at 80 %; "
        f"{per_machine} devices in a machine are assumed",
        sheet=sheet,
        measured=False,
    )


DEVICES = {
    device.name: device
    for device in (
        _assumed("a100-40gb", DataSheet(312e12, 40, 1.555e12, 600e9, "NVLink 3", 400,
                                        "NVIDIA A100 Tensor Core GPU data sheet (SXM, 40 GB)"), 200),
        _assumed("a100-80gb", DataSheet(312e12, 80, 2.039e12, 600e9, "NVLink 3", 400,
                                        "NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB)"), 200),
        _assumed("h100", DataSheet(989.4e12, 80, 3.35e12, 900e9, "NVLink 4", 700,
                                   "NVIDIA H100 Tensor Core GPU data sheet (SXM)"), 400),
        _assumed("h100-pcie", DataSheet(756e12, 80, 2e12, 128e9, "PCIe 5.0 x16", 350,
                                        "NVIDIA H100 Tensor Core GPU data sheet (PCIe)"), 200),
        H200,
        _assumed("b200", DataSheet(2250e12, 180, 8e12, 1800e9, "NVLink 5", 1000, "NVIDIA DGX B200 data sheet"), 400),
        _assumed("l4", DataSheet(121e12, 24, 300e9, 64e9, "PCIe 4.0 x16", 72, "NVIDIA L4 Tensor Core GPU data sheet"),
                 25),
        _assumed("rtx4090", DataSheet(165.2e12, 24, 1.008e12, 64e9, "PCIe 4.0 x16", 450,
                                      "NVIDIA Ada GPU architecture white paper"), 25, 4),
        _assumed("rtx5090", DataSheet(209.5e12, 32, 1.792e12, 128e9, "PCIe 5.0 x16", 575,
                                      "NVIDIA RTX Blackwell GPU architecture white paper"), 25, 4),
        _assumed("mi300x", DataSheet(1307.4e12, 192, 5.3e12, 896e9, "Infinity Fabric", 750,
                                     "AMD Instinct MI300X data sheet"), 400),
    )
}  # fmt: skip


def device(name: str) -> Device:
    """Return a device by name, or from a TOML file with the fields of `Device`.

    `products`, the former name of `matmuls`, is still read.
    """
    spelled = name.lower().replace("_", "-").replace(" ", "-")
    if spelled in DEVICES:
        return DEVICES[spelled]
    path = Path(name)
    if path.suffix != ".toml":
        hint = nearest(spelled, DEVICES, others="Use one of")
        raise ValueError(f"{name!r} is not a known device.{hint} A TOML file with the rates of a device works too.")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{name} cannot be read as TOML ({error}): give a file with the rates of a device.") from None
    types = {field.name: str if field.name in ("name", "source") else float for field in fields(Device)}
    del types["sheet"], types["measured"]
    values = {"name": path.stem, "source": str(name), "overlap": 0.0, "gaps": 0.0, **found}
    if "products" in values and "matmuls" not in values:
        values["matmuls"] = values.pop("products")
    values = {**{key: values["link"] for key in ("gather", "scatter") if "link" in values}, **values}
    for key in sorted((set(types) - {"price"}) - set(values) | set(values) - set(types)):
        problem = "has no" if key in types else "has an unknown"
        raise ValueError(f"{name} {problem} {key!r}: the fields are {', '.join(types)}.")
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if types[key] is float and not number:
            raise ValueError(f"{name}: {key}={value!r} must be a number of at least 0.")
    for key in set(types) - {"name", "source", "latency", "overlap", "price", "gaps"}:
        if not values[key]:
            raise ValueError(f"{name}: {key}=0 would make every step infinitely long: give the rate of the device.")
    return Device(**{**values, "per_machine": int(values["per_machine"])})
