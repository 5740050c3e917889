"""Size view: parameters, FLOPs and memory of a preset, a model or a config; compute-optimal training."""

import math
from typing import Any

from glassformer import sizing as size
from glassformer.config import ModelConfig, MoE, Seq2SeqConfig, from_dict, presets
from glassformer.studio import schema
from glassformer.studio.errors import LoadingError, StudioError
from glassformer.studio.models import ModelStore

MAX_EXPERTS = 1024


def sheet(models: ModelStore, request: schema.Size, torch_ready: bool = True) -> dict[str, Any]:
    """Return the result of `gf.size` as JSON."""
    config = config_of(models, request, torch_ready)
    return size.size(config, request.batch, request.context, request.dtype, request.optimizer).to_dict()


def config_of(models: ModelStore, request: schema.Size, torch_ready: bool = True) -> ModelConfig:
    if request.preset is not None:
        return presets.get(request.preset)
    if request.model is not None:
        found = models.config(request.model, torch_ready)
        if found is None:
            raise LoadingError("torch is still being imported: try again in a moment.")
        return found
    assert request.config is not None
    config = from_dict(request.config)
    blocks = config.n_layers + (config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else 0)
    experts = config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 1
    if blocks > schema.MAX_BLOCKS or experts > MAX_EXPERTS or blocks * experts > 20 * schema.MAX_BLOCKS:
        raise StudioError(
            f"{blocks} layers with {experts} experts are too many to size here: use at most {schema.MAX_BLOCKS} layers "
            f"and {MAX_EXPERTS} experts."
        )
    return config


def preset_names() -> dict[str, Any]:
    """Return every preset with its number of parameters."""
    return {"presets": [{"name": n, "parameters": size.count(presets.get(n))} for n in presets.ALL]}


def chinchilla(query: schema.ChinchillaQuery) -> dict[str, Any]:
    """Return compute-optimal training for one of flops, params and tokens, with the loss curve at that budget."""
    numbers = query.model_dump(exclude_none=True)
    found = size.chinchilla(**numbers)
    return {**found.to_dict(), "curves": [_curve(fit, found) for fit in (size.PUBLISHED, size.CORRECTED)]}


def _curve(fit: size.LossFit, found: size.Chinchilla) -> dict[str, Any]:
    """Return the loss by number of parameters at the compute budget of this fit's optimum, over three decades."""
    best = next(a for a in found.allocations if a.method == fit.source)
    models = [best.parameters * 10 ** (step / 10) for step in range(-15, 16)]
    losses = [fit.loss(N, best.flops / (6 * N)) for N in models]
    return {"method": fit.source, "flops": best.flops, "parameters": models, "loss": [_finite(x) for x in losses]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
