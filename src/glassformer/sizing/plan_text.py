"""Plans as text: every strategy for one model, or several models on several numbers of devices, with assumptions."""

import json
import math
from dataclasses import dataclass
from typing import Any

from glassformer.config import ModelConfig
from glassformer.sizing.devices import Device
from glassformer.sizing.flops import lengths, too_long
from glassformer.sizing.layout import columns, wrap
from glassformer.sizing.parameters import count
from glassformer.sizing.plan import Plan, best, compute_optimal_tokens, fastest, plans

LADDER = ("gpt2", "gpt2_xl", "llama2_7b", "llama2_70b")
"""Presets from 124 million to 69 billion parameters."""
GPUS = (1, 8, 64, 256, 1024)


@dataclass(frozen=True)
class Plans:
    """Several plans, each with its number of training tokens."""

    title: str
    rows: tuple[tuple[str, Plan, float], ...]
    """Name of the model, plan, and number of training tokens."""
    device: Device
    notes: tuple[str, ...] = ()
    """Sentences about models that cannot run sequences of the given length."""

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

    def run_file(self) -> list[str]:
        """Return one paragraph: what a run file sets for the fastest plan that fits, if all plans are of one model."""
        if len({(name, p.gpus) for name, p, _ in self.rows}) > 1 or not any(p.fits for _, p, _ in self.rows):
            return []
        found = fastest([p for _, p, _ in self.rows])
        lines = [f"{name} = {json.dumps(value)}" for name, value in found.settings.items()]
        return [
            f"Run file of the fastest plan that fits ({found.strategy}): [loop] batch = {found.batch}; "
            f"[machine] {', '.join(lines)}."
        ]

    def text(self, width: int | None = None) -> str:
        """Return the table and its assumptions as text. Columns that do not fit into `width` go on the next line."""
        rows = [_HEADINGS, *(_cells(*row) for row in self.rows)]
        if self.device.price is None:
            rows = [row[:-1] for row in rows]
        above = [wrap(line, width) for line in (self.title, *(f"Note: {note}" for note in self.notes))]
        below = [wrap(paragraph, width) for paragraph in (*self.run_file(), *_assumptions(self.device))]
        return "\n".join([*above, "", *columns(rows, width, names=2), "", *below])


_HEADINGS = (
    "model", "strategy", "GPUs", "batch", "GB/GPU", "compute", "exposed", "step", "tokens/s", "MFU", "D tokens",
    "days", "cost in USD",
)  # fmt: skip


def _cells(name: str, p: Plan, tokens: float) -> tuple[str, ...]:
    strategy = p.strategy + (", bf16" if p.weight_bytes == 2 else "") + (", recompute" if p.recompute else "")
    memory = f"{p.memory / 1e9:,.0f}" + ("" if p.fits else " !")
    if not p.fits:
        return (name, strategy, f"{p.gpus:,}", f"{p.batch:,}", memory, *(["-"] * 5), f"{tokens:.3g}", "-", "-")
    days, cost = p.hours(tokens) / 24, p.cost(tokens)
    return (
        name, strategy, f"{p.gpus:,}", f"{p.batch:,}", memory,
        _seconds(p.compute), _seconds(p.exposed), _seconds(p.step),
        f"{p.tokens_per_second:,.0f}", f"{p.utilisation:.0%}", f"{tokens:.3g}",
        f"{days:,.2f}" if days < 10 else f"{days:,.0f}", "-" if cost is None else f"{cost:,.0f}",
    )  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _assumptions(device: Device) -> list[str]:
    """Return the assumptions of a plan as paragraphs, with line breaks for a wide terminal."""
    price = "No cost is printed: give --price in US dollars per GPU and hour."
    if device.price is not None:
        price = f"Cost: {device.price:g} USD per GPU and hour, as given."
    return [
        f"Rates of {device.name}: matmuls {device.matmuls / 1e12:,.4g} TFLOP/s, attention "
        f"{device.attention / 1e12:,.4g} TFLOP/s, memory {device.memory / 1e9:,.4g} GB/s, "
        f"{device.gaps * 1e3:g} ms of gaps per step;\n"
        f"links {_rates(device)} GB/s between the {device.per_machine} devices of a machine and "
        f"{device.network / 1e9:.4g} GB/s per device to other machines;\n"
        f"communication overlaps with {device.overlap:.0%} of the pass.",
        f"Source: {device.source}.",
        price,
        "State: 16 bytes per parameter. Matmuls: bfloat16. Gradients are sent in float32, and so are weights unless it "
        "says bf16;\ncopying shards into and out of buffers does not overlap with compute.",
        "Columns: `exposed` is communication that does not overlap with compute; MFU is FLOP/s as a share of the "
        "peak;\n`bf16` means machine.gather = 'bfloat16', `recompute` machine.recompute = 'full'; `!` means that the "
        "plan does not fit into memory.",
        "With `context c`, c devices compute the sequences of one together, so that a step has fewer sequences.",
        "Communication between GPUs was not measured: it is computed from the links above.",
    ]


def _rates(device: Device) -> str:
    """Return the rates of the links; a single number if all collectives have the same rate."""
    rates = {"all-reduce": device.link, "all-gather": device.gather, "reduce-scatter": device.scatter}
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
    """Return a plan of each strategy for one model on this many devices. Default tokens: compute-optimal.

    Context parallelism is shown up to the first degree that fits, a combination only if it is the fastest plan.
    """
    _check_tokens(tokens)
    training_tokens = tokens or compute_optimal_tokens(config)
    found = plans(config, gpus, device, batch, context)
    enough = next((p.batch for p in found if p.strategy.startswith("context") and p.fits), 0)
    chosen = [
        p for p in found if p is fastest(found) or (" x " not in p.strategy and p.batch >= min(enough, found[0].batch))
    ]
    rows = [(name, p, training_tokens) for p in chosen]
    title = f"{name}, {count(config):,} parameters, on {gpus:,} x {device.name}, {batch} sequences per device"
    return Plans(title, tuple(rows), device, _notes({name: config}, context))


def plan_ladder(
    models: dict[str, ModelConfig],
    device: Device,
    batch: int = 8,
    context: int | None = None,
    tokens: float | None = None,
) -> Plans:
    """Return the fastest plan that fits, for each model on each number of devices in GPUS."""
    _check_tokens(tokens)
    rows = []
    for name, config in models.items():
        for gpus in GPUS:
            found = best(config, gpus, device, batch, context or min(config.max_len or 1024, 4096))
            rows.append((name, found, tokens or compute_optimal_tokens(config)))
    title = f"The fastest strategy that fits, {batch} sequences per {device.name}"
    return Plans(title, tuple(rows), device, _notes(models, context))


def _check_tokens(tokens: float | None) -> None:
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens} must be a positive finite number: leave it out for the compute-optimal one.")


def _notes(models: dict[str, ModelConfig], context: int | None) -> tuple[str, ...]:
    sentences = {name: too_long(config, *lengths(config, context, None)) for name, config in models.items()}
    return tuple(f"{name}: {sentence}" for name, sentence in sentences.items() if sentence)
