"""Measurements of the lens for `glass train`: `train` may not import it, so whoever stands above hands these in."""

from typing import Any

from glassformer.lens.heads import head_table
from glassformer.model import Model
from glassformer.training.data.source import Source
from glassformer.training.probes import Probe
from glassformer.training.run import RunConfig

SCORES = {"induction": "induction", "previous": "previous_token"}
"""Name in the log to name in the table of heads."""


def head_scores(model: Model, data: Source, run: RunConfig) -> dict[str, Any]:
    """Induction and previous-token score of every head, as (L,H) grids, on the same random repeated rows each time."""
    table = head_table(model, rows=16, seed=run.seed, weights=False)
    grids: dict[str, list[list[float | None]]] = {name: [[] for _ in range(model.config.n_layers)] for name in SCORES}
    for row in table.rows:
        for name, score in SCORES.items():
            grids[name][row.layer].append(row.scores[score])
    return grids


PROBES: dict[str, Probe] = {"heads": head_scores}
