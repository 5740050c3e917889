"""Figures of a training run, from its log.jsonl: the loss with its baselines, and the probes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from glassformer.lens.figure import COLOURS, GREY, Figure, FigureError
from glassformer.lens.figures.labels import titled, wording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = dict[str, tuple[list[int | float], list[float]]]
"""name -> (steps, values)"""


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of a run from its folder or its log.jsonl. Lines that a crash cut off are skipped."""
    file = Path(path)
    file = file / "log.jsonl" if file.is_dir() else file
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FigureError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or 'not text'}): give a run's folder, such as "
            "runs/shakespeare, or its log.jsonl."
        ) from None
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def training_curves(
    log: str | Path | Sequence[Mapping[str, Any]],
    *,
    probes: Series | None = None,
    title: str = "Loss during training",
) -> Figure:
    """Draw training and validation loss over the steps with the baselines as lines; below, the curves of the probes.

    `probes` maps a name to (steps, values). Default: the `probe` events of the log.
    """
    events = read_log(log) if isinstance(log, str | Path) else list(log)
    losses = losses_of(events)
    if not any(steps for steps, _ in losses.values()):
        raise FigureError("the log has no step and no validation event: train for at least one step first.")
    probes = probe_series(events) if probes is None else probes
    with titled(title, height=5.6 if probes else 3.4) as figure:
        axes = figure.canvas.subplots(2 if probes else 1, 1, squeeze=False, sharex=True).ravel()
        _losses(axes[0], losses, _baselines(events))
        if probes:
            _probes(axes[1], probes)
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def losses_of(events: Sequence[Mapping[str, Any]]) -> Series:
    """Return training and validation loss, each as steps and values."""
    series: Series = {}
    for name, kind in (("training", "step"), ("validation", "validation")):
        found = [(e["step"], e["loss"]) for e in events if e.get("event") == kind]
        series[name] = ([step for step, _ in found], [loss for _, loss in found])
    return series


def _baselines(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    start = next((e for e in events if e.get("event") == "start"), {})
    known = {"uniform": start["uniform"]} if "uniform" in start else {}
    return known | dict(start.get("baselines") or {})


def _losses(ax: "Axes", losses: Series, baselines: Mapping[str, float]) -> None:
    for i, (name, (steps, values)) in enumerate(losses.items()):
        if steps:
            mark = "o" if name == "validation" or len(steps) == 1 else None
            ax.plot(steps, values, color=COLOURS[i], label=name, marker=mark, markersize=3, linewidth=1.2)
    for i, (name, value) in enumerate(baselines.items()):
        style = (0, (1 + 2 * i, 2))
        ax.axhline(value, color=GREY, linewidth=1, linestyle=style, label=f"{wording(name, 30)}: {value:.3f}")
    ax.set_ylabel("loss (nats per token)")
    ax.set_ylim(*_limits([*baselines.values(), *(value for _, values in losses.values() for value in values)]))
    ax.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of the finite values and a twentieth of it on each side, but nothing below 0 for values above it."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low) or 0.5
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def probe_series(events: Sequence[Mapping[str, Any]]) -> Series:
    """Return the numbers of the `probe` events as curves; of a list or grid (layers, heads), the maximum."""
    series: Series = {}
    for event in events:
        if event.get("event") != "probe":
            continue
        for name, value in event.items():
            if name in ("event", "step", "seconds"):
                continue
            for path, number in _numbers("" if name == "heads" else name, value):
                steps, values = series.setdefault(path, ([], []))
                steps.append(event["step"])
                values.append(number)
    return series


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return []
    if isinstance(value, Mapping):
        return [
            found
            for key, inner in value.items()
            for found in _numbers(f"{name} {key}".strip().replace("_", " "), inner)
        ]
    if isinstance(value, Sequence):
        inner = [number for item in value for _, number in _numbers(name, item)]
        return [(f"{name} (largest)", max(inner))] if inner else []
    return [(name, float(value))]


def _probes(ax: "Axes", probes: Series) -> None:
    within = {name: line for name, line in probes.items() if max(line[1]) <= 1.0 and min(line[1]) >= 0}
    shown = within or probes
    for i, (name, (steps, values)) in enumerate(shown.items()):
        ax.plot(steps, values, color=COLOURS[i % 7], label=wording(name, 30), marker=".", markersize=3, linewidth=1.2)
    ax.set_ylabel("score" if within else "value")
    if within:
        ax.set_ylim(0, 1.02)
    ax.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
