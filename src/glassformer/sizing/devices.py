"""What one device and its links can do: the rates from which `plan` predicts a training step.

A training step on one device is the sum of five times, each a count divided by a rate:

    matmuls    6 · weights · tokens FLOPs (forward and backward)                      / products
    attention  3.5 · (scores and pattern·v under the mask): 2 matmuls forward, 5 back / attention
    pointwise  tokens · (L · (42·D + 13.4·F) + 7.5·V) bytes, F counted 1.5 times when gated   / memory
    optimizer  parameters · 50 bytes                                                  / memory
    gaps       a constant: launches, tails of kernels, the host

The five constants were measured on one H200: GPT-2 124M, 64 x 1024 tokens, compiled, bfloat16 matmuls with float32
weights (matmuls 65.3 ms, attention 17.3, the rest 23.6; 109.1 ms in all). Batches of 12 and 32 were not used to find
them.

To measure the rates again, after a change of kernels or for another device:

    products, attention, memory, gaps, capacity
        python -m glassformer.bench.gpu.plan_gpu profiles that step, prints the values as they appear below, and checks
        them at batches of 12, 32 and 64
    link, gather, scatter, latency
        python -m glassformer.bench.developer.plan, on two gloo ranks. Between GPUs none was measured; nccl-tests would,
        by the bus bandwidth of all_reduce_perf, all_gather_perf and reduce_scatter_perf

Only the H200 was measured. The other devices are data sheets: their rates are the data sheet's figures times the shares
that the H200 reached of its own (`ASSUMED`), which is an assumption and is printed as one.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from glassformer.config.errors import nearest


@dataclass(frozen=True)
class DataSheet:
    """Figures as the vendor publishes them."""

    peak: float
    """Dense bfloat16 FLOP/s with float32 accumulation, without sparsity."""
    gigabytes: int
    bandwidth: float
    """Bytes per second of the memory."""
    link: float
    """Bytes per second to other devices of the machine, both directions together."""
    link_kind: str
    watts: int
    """Largest board power (TDP)."""
    document: str


@dataclass(frozen=True)
class Device:
    """Rates in FLOP/s and bytes/s, memory in bytes, links per device and direction."""

    name: str
    products: float
    """Matmuls of a training step."""
    attention: float
    """The attention kernel, forward and backward."""
    memory: float
    """Bytes per second through memory, reading and writing."""
    capacity: float
    """Bytes a program may use."""
    peak: float
    """Dense bfloat16 FLOP/s of the data sheet, the reference for utilisation."""
    gaps: float
    """Seconds per step that the rates do not explain."""
    link: float
    """Bytes per second to neighbours in the same machine, in an all-reduce."""
    gather: float
    """The same in an all-gather; a ring runs both at the same rate, gloo does not."""
    scatter: float
    """The same in a reduce-scatter."""
    network: float
    """Bytes per second to other machines."""
    per_machine: int
    latency: float
    """Seconds until a message to a neighbour begins to arrive."""
    overlap: float
    """Share of the time of the backward pass (sharded: of the whole pass) that hides communication: near 1 where
    separate engines copy, 0 where the link is the memory of the processor that computes."""
    source: str
    price: float | None = None
    """US dollars for one device and hour. None: no cost is computed."""
    sheet: DataSheet | None = None
    measured: bool = True
    """False if the rates are assumed shares of the data sheet."""


H200 = Device(
    name="h200",
    products=744e12, attention=250e12, memory=3.76e12, capacity=139 * 2**30, peak=990e12, gaps=2.9e-3,
    link=360e9, gather=360e9, scatter=360e9, network=40e9, per_machine=8, latency=10e-6, overlap=0.9,
    source="matmuls, attention, memory, capacity and gaps were measured on one H200 (docs/benchmarks.md); links are "
    "80 % of the data sheet's 450 GB/s a direction (NVLink 4) and of an assumed network of 400 Gbit/s per device",
    sheet=DataSheet(990e12, 141, 4.8e12, 900e9, "NVLink 4", 700, "NVIDIA H200 Tensor Core GPU data sheet"),
)  # fmt: skip

ASSUMED = {
    "products": H200.products / 990e12,
    "attention": H200.attention / 990e12,
    "memory": H200.memory / 4.8e12,
    "link": 0.8,
}
"""Shares of the data sheet that an unmeasured device is assumed to reach: those of the H200."""


def _assumed(name: str, sheet: DataSheet, network: float, per_machine: int = 8) -> Device:
    """A device that was not measured: the data sheet times ASSUMED. `network`: Gbit/s per device to other machines."""
    link = sheet.link / 2 * ASSUMED["link"]
    return Device(
        name=name,
        products=sheet.peak * ASSUMED["products"],
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
        source=f"{sheet.document}. Not measured on this device: matmuls at {ASSUMED['products']:.0%} of the peak, "
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
    """Return a device by name, or from a TOML file with the fields of `Device`."""
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
    wanted = {field.name: str if field.name in ("name", "source") else float for field in fields(Device)}
    del wanted["sheet"], wanted["measured"]
    known = {**{"name": path.stem, "source": str(name), "overlap": 0.0, "gaps": 0.0}, **found}
    known = {**{key: known["link"] for key in ("gather", "scatter") if "link" in known}, **known}
    for key in sorted((set(wanted) - {"price"}) - set(known) | set(known) - set(wanted)):
        what = "has no" if key in wanted else "has an unknown"
        raise ValueError(f"{name} {what} {key!r}: the fields are {', '.join(wanted)}.")
    for key, value in known.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if wanted[key] is float and not number:
            raise ValueError(f"{name}: {key}={value!r} must be a number of at least 0.")
    for key in set(wanted) - {"name", "source", "latency", "overlap", "price", "gaps"}:
        if not known[key]:
            raise ValueError(f"{name}: {key}=0 would take for ever: give what the device does.")
    return Device(**{**known, "per_machine": int(known["per_machine"])})
