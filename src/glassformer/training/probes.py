"""Measurements during training. `[probe]` of a run selects them by name; log.jsonl stores them as `probe` events.

A probe is a function of (model, data, run) that returns plain numbers. `lens.figures.training` reads and draws them.
"""

from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.model import Model
from glassformer.sizing.parameters import PARTS, part_of
from glassformer.training import checkpoint
from glassformer.training.data.batches import IGNORED
from glassformer.training.data.source import Source
from glassformer.training.objective import Batch, hidden_states, make_batch
from glassformer.training.optimizers import evaluating
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
    from glassformer.lens.heads import head_table  # not needed by other runs

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


def measure(state: "TrainState", data: Source, probes: dict[str, Probe]) -> dict[str, Any]:
    """Return the results of the probes on the current model: averaged weights if there are any, without dropout."""
    state.settle()
    held, found = checkpoint.random_state(state.device), {}
    try:
        with evaluating(state.model, state.average):
            model = state.group.whole_model(state.model)
            if model is not None and state.group.is_main:
                with torch.no_grad(), state.autocast():
                    found = {name: probe(model.eval(), data, state.run) for name, probe in probes.items()}
    finally:
        checkpoint.set_random_state(held, state.device)
    return found
