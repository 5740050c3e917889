"""Measurements during training. `[probe]` of a run selects them by name; log.jsonl stores them as `probe` events.

A probe is a function of (model, data, run) that returns plain numbers. `read_curves` returns what was measured, as
curves over the steps.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.lens.heads import head_table
from glassformer.model import Model
from glassformer.sizing.parameters import PARTS, part_of
from glassformer.training import checkpoint
from glassformer.training.data.batches import IGNORED
from glassformer.training.data.corpus import DataError
from glassformer.training.data.source import Source
from glassformer.training.objective import Batch, hidden_states, make_batch
from glassformer.training.run import Probe as ProbeSection
from glassformer.training.run import Run

if TYPE_CHECKING:
    from glassformer.training.loop import TrainState

Probe = Callable[[Model, Source, Run], dict[str, Any]]


def weight_norms(model: Model, data: Source, run: Run) -> dict[str, float]:
    """Return the Euclidean norm of all parameters (`total`), and of each part (`embedding`, `attention`, ...).

    The squares of the parts add up to the square of the total.
    """
    squares = dict.fromkeys(PARTS, 0.0)
    for name, value in model.named_parameters():
        squares[part_of(name)] += float(value.detach().double().square().sum())
    return {"total": sum(squares.values()) ** 0.5, **{part: s**0.5 for part, s in squares.items() if s > 0}}


def accuracy(model: Model, data: Source, run: Run) -> dict[str, float]:
    """Return the accuracy of the most likely token: on the first training batch, and on the validation batches."""
    return {
        "train": _hits(model, [data.order(run).batch(0)], run),
        "validation": _hits(model, list(islice(data.validation(run), run.loop.eval_batches)), run),
    }


@torch.no_grad()
def _hits(model: Model, windows: list[tuple[Tensor, Tensor] | Batch], run: Run) -> float:
    hit = count = 0
    for number, window in enumerate(windows):
        batch = make_batch(run, window, step=number).to(model.device)
        logits = model.logits(hidden_states(model, batch))
        counted = batch.targets != IGNORED
        hit += int(((logits.argmax(-1) == batch.targets) & counted).sum())
        count += int(counted.sum())
    return hit / max(count, 1)


SCORES = {"induction": "induction", "previous": "previous_token"}
"""Name of a score in the log, and its name in the table of heads."""


def head_scores(model: Model, data: Source, run: Run) -> dict[str, Any]:
    """Return the induction and previous-token score of every head, as (L,H) grids.

    They are measured on the same random repeated sequences each time.
    """
    table = head_table(model, rows=16, seed=run.seed, weights=False)
    grids: dict[str, list[list[float | None]]] = {name: [[] for _ in range(model.config.n_layers)] for name in SCORES}
    for row in table.rows:
        for name, score in SCORES.items():
            grids[name][row.layer].append(row.scores[score])
    return grids


PROBES: dict[str, Probe] = {"norms": weight_norms, "accuracy": accuracy, "heads": head_scores}


def chosen_probes(section: ProbeSection) -> dict[str, Probe]:
    """Return the probes that a run selects."""
    names = [field.name for field in fields(section) if field.name != "every" and getattr(section, field.name)]
    return {name: PROBES[name] for name in names}


@dataclass(frozen=True)
class Curves:
    """What the probes of a run measured: `values[name][i]` at `steps[i]`. Nested results have dotted names."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self.values:
            raise DataError(f"no probe measured {name!r}: there are {', '.join(sorted(self.values)) or 'none'}.")
        return self.values[name]

    def heads(self, score: str = "induction") -> dict[tuple[int, int], list[float | None]]:
        """Return the curve of a score over the steps for each (layer, head)."""
        grids = self[f"heads.{score}"]  # one (L, H) grid per step
        return {
            (layer, head): [grid[layer][head] for grid in grids]
            for layer, row in enumerate(grids[0])
            for head, _ in enumerate(row)
        }


def read_curves(path: str | Path) -> Curves:
    """Return the curves in a log.jsonl, or in the folder of a run. Raises DataError if there are none."""
    file = Path(path)
    file = file / "log.jsonl" if file.is_dir() else file
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): give the folder of a run.") from None
    events = []
    for line in lines:
        with suppress(ValueError):  # a line cut off by a crash
            events.append(json.loads(line))
    found = {e["step"]: _flat(e) for e in events if isinstance(e, dict) and e.get("event") == "probe"}
    if not found:
        raise DataError(f"{file} has no probe events: train with --set probe.every=50.")
    steps = sorted(found)
    names = dict.fromkeys(name for step in steps for name in found[step])
    return Curves(steps, {name: [found[step].get(name) for step in steps] for name in names})


def _flat(event: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in event.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        elif prefix:
            out[prefix + key] = value
    return out


def measure(state: "TrainState", data: Source, probes: dict[str, Probe]) -> dict[str, Any]:
    """Return the results of the probes on the current model: averaged weights if there are any, without dropout."""
    state.settle()
    held, found = checkpoint.random_state(state.device), {}
    if state.average is not None:
        state.average.swap(state.model)
    state.model.eval()
    try:
        model = state.group.whole_model(state.model)
        if model is not None and state.group.is_main:
            with torch.no_grad(), state.autocast():
                found = {name: probe(model.eval(), data, state.run) for name, probe in probes.items()}
    finally:
        state.model.train()
        if state.average is not None:
            state.average.swap(state.model)
        checkpoint.set_random_state(held, state.device)
    return found
