"""What one device and its links can do: the measured rates from which `plan` predicts.

A training step on one device is the sum of five times, each a count divided by a rate:

    products   6 · weights · tokens FLOPs (forward and backward)                   / products
    attention  3.5 · (scores and mix under the mask): 2 products forward, 5 back   / attention
    pointwise  tokens · (L · (42·D + 13.4·F) + 7.5·V) bytes, F counted 1.5 times when gated   / memory
    optimizer  parameters · 50 bytes                                               / memory
    gaps       a constant: launches, tails of kernels, the host

The five constants are those of a profiled step of ours: GPT-2 124M, 64 x 1024 tokens, compiled, bfloat16 products with
float32 weights, on one H200 (products 65.3 ms, attention 17.3, the rest 23.6; 109.1 ms by the clock). Batches of 12 and
32 were not used to find them.

What measures each rate anew, after a change of kernels or for another device:

    products, attention, memory, gaps, capacity
        python -m glassformer.bench.gpu.plan_gpu: profiles that step, prints these as they stand in the table
        below, and checks them at batches of 12, 32 and 64
    link, gather, scatter, latency
        python -m glassformer.bench.developer.plan, on two gloo ranks. Between GPUs none was measured; nccl-tests would,
        by the bus bandwidth of all_reduce_perf, all_gather_perf and reduce_scatter_perf
    peak, network, per_machine, price: the maker's and the seller's word. overlap: an assumption, printed with each plan
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """Rates in FLOP/s and bytes/s, memory in bytes, links per device and direction."""

    name: str
    products: float
    """Matrix products of a training step."""
    attention: float
    """The attention kernel, forward and backward."""
    memory: float
    """Bytes per second through memory, reading and writing."""
    capacity: float
    """Bytes a program may use."""
    peak: float
    """What the maker promises for dense bfloat16, to speak of utilisation."""
    gaps: float
    """Seconds per step that nothing above explains."""
    link: float
    """Bytes per second to neighbours in the same machine, in an all-reduce."""
    gather: float
    """The same in a gather; a ring does both alike, gloo does not."""
    scatter: float
    """The same in a reduce-scatter."""
    network: float
    """Bytes per second to other machines."""
    per_machine: int
    latency: float
    """Seconds for a message to a neighbour to begin to arrive."""
    overlap: float
    """Share of the time of the backward pass (sharded: of the whole pass) under which communication can hide: near 1
    where engines of their own copy, 0 where the link is the memory of the processor that computes."""
    price: float
    """Of an hour, in a currency of your choice."""
    source: str


H200 = Device(
    name="h200",
    products=744e12, attention=250e12, memory=3.76e12, capacity=139 * 2**30, peak=990e12, gaps=2.9e-3,
    link=360e9, gather=360e9, scatter=360e9, network=40e9, per_machine=8, latency=10e-6, overlap=0.9, price=3.0,
    source="products, attention, memory, capacity and gaps measured on one device (docs/benchmarks.md); links are the "
    "maker's 450 GB/s (NVLink 4) and 400 Gbit/s per device, of which 80 % are taken; the price is a placeholder",
)  # fmt: skip
DEVICES = {device.name: device for device in (H200,)}


def device(name: str) -> Device:
    """A device by name, or from a TOML file with these fields."""
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(
            f"no rates were measured for {name!r}: use {' or '.join(DEVICES)}, or give a TOML file with your own."
        )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{name} cannot be read as TOML ({error}): give a file with the rates of a device.") from None
    wanted = {field.name: str if field.name in ("name", "source") else float for field in fields(Device)}
    known = {**{"name": path.stem, "source": str(name), "overlap": 0.0, "price": 0.0, "gaps": 0.0}, **found}
    known = {**{key: known["link"] for key in ("gather", "scatter") if "link" in known}, **known}
    for key in sorted(set(wanted) ^ set(known)):
        what = "has no" if key in wanted else "has an unknown"
        raise ValueError(f"{name} {what} {key!r}: the fields are {', '.join(wanted)}.")
    for key, kind in wanted.items():
        value = known[key]
        if kind is float and not (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0):
            raise ValueError(f"{name}: {key}={value!r} must be a number of at least 0.")
    for key in set(wanted) - {"name", "source", "latency", "overlap", "price", "gaps"}:
        if not known[key]:
            raise ValueError(f"{name}: {key}=0 would take for ever: give what the device does.")
    return Device(**{**known, "per_machine": int(known["per_machine"])})
