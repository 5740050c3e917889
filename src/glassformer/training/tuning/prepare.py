"""The model of a run that starts from an existing one: loaded, with its frozen parameters or its adapters."""

import torch

from glassformer.model import Model, build
from glassformer.training.optimizers import HELD_ROWS
from glassformer.training.run import Run
from glassformer.training.tuning.extend import TOKEN_TABLES
from glassformer.training.tuning.freeze import freeze
from glassformer.training.tuning.lora import add_adapters
from glassformer.training.tuning.start import load_start


def tuned_model(run: Run, device: str | torch.device, resumed: bool) -> Model:
    """Return the model of the first step. Weights that a resumed run loads from its checkpoint are not read here.

    A checkpoint of adapters holds nothing else, so that the frozen weights are always read from the model of [start].
    """
    if run.start.model and (run.lora is not None or not resumed):
        model = load_start(run, device)
    else:
        model = build(run.model, seed=run.seed, device=device)
    hold_and_freeze(model, run)
    return model


def hold_and_freeze(model: Model, run: Run) -> None:
    """Mark what training must not change: rows of the token tables that no token has, and frozen parameters.

    With [lora], everything is frozen, and the layers get their adapters.
    """
    if run.lora is not None:
        add_adapters(model, run)
    if run.lora is None and run.start.n_tokens:
        hold_padding(model, run.start.n_tokens)
    freeze(model, run.optim.freeze)


def hold_padding(model: Model, first: int) -> None:
    """Let the optimizer keep the rows of the token tables from `first` on: no tokenizer writes these ids."""
    tables = [name for name, p in model.named_parameters() if name in TOKEN_TABLES and p.shape[0] > first]
    setattr(model, HELD_ROWS, dict.fromkeys(tables, first))
