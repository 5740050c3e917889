"""Plans as text: one model on one number of devices in every way, or models against numbers, with what was assumed."""

import math
from dataclasses import dataclass
from typing import Any

from glassformer.config import ModelConfig
from glassformer.sizing.devices import Device
from glassformer.sizing.flops import beyond, lengths
from glassformer.sizing.layout import columns, fit
from glassformer.sizing.parameters import count
from glassformer.sizing.plan import Plan, best, compute_optimal_tokens, plan, strategies

LADDER = ("gpt2", "gpt2_xl", "llama2_7b", "llama2_70b")
"""Presets from 124 million to 69 billion parameters."""
GPUS = (1, 8, 64, 256, 1024)


@dataclass(frozen=True)
class Plans:
    """Several plans and the tokens they are to train on. `text()` is for people, `to_dict()` for programs."""

    title: str
    rows: tuple[tuple[str, Plan, float], ...]
    """What the row is called, its plan, the tokens of the whole training."""
    device: Device
    notes: tuple[str, ...] = ()
    """Models that cannot run sequences of the length asked for."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "device": self.device.name,
            "source": self.device.source,
            "measured": self.device.measured,
            "price": self.device.price,
            "currency": "USD",
            "notes": list(self.notes),
            "plans": [
                {"name": name, **p.to_dict(), "training_tokens": n, "hours": p.hours(n), "cost": p.cost(n)}
                for name, p, n in self.rows
            ],
        }

    def text(self, width: int | None = None) -> str:
        """The table and its assumptions; columns that would go beyond `width` stand below the first ones."""
        rows = [_HEADINGS, *(_cells(*row) for row in self.rows)]
        if self.device.price is None:
            rows = [row[:-1] for row in rows]
        above = [fit(said, width) for said in (self.title, *(f"Note: {note}" for note in self.notes))]
        below = [fit(said, width) for said in _assumptions(self.device)]
        return "\n".join([*above, "", *columns(rows, width, names=2), "", *below])


_HEADINGS = (
    "model", "how", "GPUs", "sequences", "GB each", "compute", "waiting", "step", "tokens/s", "of peak", "D tokens",
    "days", "cost in USD",
)  # fmt: skip


def _cells(name: str, p: Plan, tokens: float) -> tuple[str, ...]:
    how = p.strategy + (", recomputing" if p.recompute else "")
    memory = f"{p.memory / 1e9:,.0f}" + ("" if p.fits else " !")
    if not p.fits:
        return (name, how, f"{p.gpus:,}", f"{p.batch:,}", memory, *(["-"] * 5), f"{tokens:.3g}", "-", "-")
    days, cost = p.hours(tokens) / 24, p.cost(tokens)
    return (
        name, how, f"{p.gpus:,}", f"{p.batch:,}", memory, _seconds(p.compute), _seconds(p.exposed), _seconds(p.step),
        f"{p.tokens_per_second:,.0f}", f"{p.utilisation:.0%}", f"{tokens:.3g}",
        f"{days:,.2f}" if days < 10 else f"{days:,.0f}", "-" if cost is None else f"{cost:,.0f}",
    )  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _assumptions(device: Device) -> list[str]:
    """Paragraphs, in lines for a wide terminal."""
    price = "No cost is printed: give --price, in US dollars for one GPU and hour."
    if device.price is not None:
        price = f"Cost: {device.price:g} USD for one GPU and hour, as given."
    return [
        f"Rates of {device.name}: matmuls {device.products / 1e12:,.4g} TFLOP/s, attention "
        f"{device.attention / 1e12:,.4g} TFLOP/s, memory {device.memory / 1e9:,.4g} GB/s, "
        f"{device.gaps * 1e3:g} ms of gaps in a step;\n"
        f"links {_rates(device)} GB/s among the {device.per_machine} of a machine and "
        f"{device.network / 1e9:.4g} GB/s per device to other machines; {device.overlap:.0%} of the pass hides them.",
        f"Source: {device.source}.",
        price,
        "State: 16 bytes per parameter. Matmuls: bfloat16. Weights and gradients are sent in float32, as "
        "`glass train` does;\ncopying shards together and apart is not hidden. `!`: does not fit.",
        "Communication between GPUs was not measured: it follows from the links above.",
    ]


def _rates(device: Device) -> str:
    """One number where sums, gathers and scatters go at the same rate."""
    rates = {"sums": device.link, "gathers": device.gather, "scatters": device.scatter}
    if len({*rates.values()}) == 1:
        return f"{device.link / 1e9:.4g}"
    return ", ".join(f"{value / 1e9:.4g} ({name})" for name, value in rates.items())


def plan_model(
    config: ModelConfig,
    name: str,
    gpus: int,
    device: Device,
    batch: int = 8,
    context: int | None = None,
    tokens: float | None = None,
) -> Plans:
    """Every way to train one model on this many devices."""
    _check_tokens(tokens)
    wanted = tokens or compute_optimal_tokens(config)
    rows = [(name, plan(config, gpus, device, how, batch, context), wanted) for how in strategies(gpus, device)]
    title = f"{name}, {count(config):,} parameters, on {gpus:,} x {device.name}, {batch} sequences each"
    return Plans(title, tuple(rows), device, _notes({name: config}, context))


def plan_ladder(
    models: dict[str, ModelConfig],
    device: Device,
    batch: int = 8,
    context: int | None = None,
    tokens: float | None = None,
) -> Plans:
    """The fastest way that fits, of each model on each number of devices."""
    _check_tokens(tokens)
    rows = []
    for name, config in models.items():
        for gpus in GPUS:
            found = best(config, gpus, device, batch, context or min(config.max_len or 1024, 4096))
            rows.append((name, found, tokens or compute_optimal_tokens(config)))
    title = f"The fastest way that fits, {batch} sequences on each {device.name}"
    return Plans(title, tuple(rows), device, _notes(models, context))


def _check_tokens(tokens: float | None) -> None:
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens} must be a positive finite number; leave it out for the compute-optimal one.")


def _notes(models: dict[str, ModelConfig], context: int | None) -> tuple[str, ...]:
    told = {name: beyond(config, *lengths(config, context, None)) for name, config in models.items()}
    return tuple(f"{name}: {why}" for name, why in told.items() if why)
