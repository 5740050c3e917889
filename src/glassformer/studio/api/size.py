"""Size: the sheet of a preset, a model on the shelf, or a config of one's own; compute-optimal training."""

import math
from typing import Any

from glassformer import sizing as size
from glassformer.config import ModelConfig, MoE, Seq2SeqConfig, from_dict, presets
from glassformer.studio import schema
from glassformer.studio.errors import LoadingError, StudioError
from glassformer.studio.shelf import Shelf

MOST_BLOCKS, MOST_EXPERTS, LARGEST = 1000, 1024, 10**7
"""A sheet counts parameter by parameter: beyond these, a config is a mistake or an attack."""


def sheet(shelf: Shelf, asked: schema.Size, torch_ready: bool = True) -> dict[str, Any]:
    """`gf.size(...)` as plain numbers."""
    config = config_of(shelf, asked, torch_ready)
    return size.size(config, asked.batch, asked.context, asked.dtype, asked.optimizer).to_dict()


def config_of(shelf: Shelf, asked: schema.Size, torch_ready: bool = True) -> ModelConfig:
    if asked.preset is not None:
        return presets.get(asked.preset)
    if asked.model is not None:
        found = shelf.config(asked.model, torch_ready)
        if found is None:
            raise LoadingError("torch is still being imported: ask again in a moment.")
        return found
    assert asked.config is not None
    _bounded(asked.config)
    config = from_dict(asked.config)
    blocks = config.n_layers + (config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else 0)
    experts = config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 1
    if blocks > MOST_BLOCKS or experts > MOST_EXPERTS or blocks * experts > 20 * MOST_BLOCKS:
        raise StudioError(
            f"{blocks} layers of {experts} experts are more than is counted here: {MOST_BLOCKS} layers, {MOST_EXPERTS} "
            "experts."
        )
    return config


def _bounded(value: Any) -> None:
    """No number beyond a sensible width or vocabulary, in any field."""
    if isinstance(value, dict):
        for item in value.values():
            _bounded(item)
    elif isinstance(value, list):
        if len(value) > MOST_BLOCKS:
            raise StudioError(f"a list of {len(value)} numbers in a config: {MOST_BLOCKS} at most.")
        for item in value:
            _bounded(item)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise StudioError(f"{str(value)[:30]} in a config is more than {LARGEST:,}: give a smaller number.")


def preset_names() -> dict[str, Any]:
    """Every preset with its parameters."""
    return {"presets": [{"name": n, "parameters": size.count(presets.get(n))} for n in presets.ALL]}


def chinchilla(given: dict[str, str]) -> dict[str, Any]:
    """Compute-optimal training for one of flops, params and tokens; with the curve of losses at that budget."""
    numbers: dict[str, float] = {}
    for name, text in given.items():
        if name not in ("flops", "params", "tokens", "ratio"):
            raise StudioError(f"{name[:60]!r} is not known: give flops, params or tokens.")
        try:
            numbers[name] = float(text)
        except ValueError:
            raise StudioError(f"{name}={text[:60]!r} must be a number.") from None
        if not 0 < numbers[name] <= 1e40:
            raise StudioError(f"{name}={text[:60]} must be positive and at most 1e40.")
    found = size.chinchilla(**numbers)  # type: ignore[arg-type]
    return {**found.to_dict(), "curves": [_curve(fit, found) for fit in (size.PUBLISHED, size.CORRECTED)]}


def _curve(fit: size.LossFit, found: size.Chinchilla) -> dict[str, Any]:
    """Loss against parameters at the budget of this fit's optimum: three powers of ten around it."""
    best = next(a for a in found.allocations if a.method == fit.source)
    models = [best.parameters * 10 ** (step / 10) for step in range(-15, 16)]
    losses = [fit.loss(N, best.flops / (6 * N)) for N in models]
    return {"method": fit.source, "flops": best.flops, "parameters": models, "loss": [_plain(x) for x in losses]}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
