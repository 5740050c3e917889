"""Positions view: a position scheme as a heat map, as a curve over offsets, and as the rotation of one pair."""

from typing import TYPE_CHECKING, Any

from glassformer import config as c
from glassformer.studio import schema
from glassformer.studio.encoding import Dtype, TensorResponse
from glassformer.studio.errors import StudioError
from glassformer.studio.models import ModelStore

if TYPE_CHECKING:
    from torch import Tensor


def positions(models: ModelStore, request: schema.Positions) -> TensorResponse:
    """Return `map`, one row per position (ALiBi, T5: query by key of one head), and `curves` over relative `offsets`.

    All values come from the functions of `glassformer.model.positions`. The chosen `pair` is rotated by `offset`
    positions.
    """
    import torch

    offsets = torch.arange(-(request.length - 1), request.length)
    heat, curves, meta = _SCHEMES[request.kind](models, request, offsets)
    angles = _pair(request)
    tensors: dict[str, tuple[Any, Dtype]] = {
        "map": (heat, "float16"),
        "offsets": (offsets, "int32"),
        "curves": (curves, "float32"),
    }
    return TensorResponse(tensors, {"kind": request.kind, "rotation": angles, **meta})


def _pair(request: schema.Positions) -> dict[str, float] | None:
    """Return the rotation of one pair by `offset` positions."""
    if request.kind not in ("rotary", "sinusoidal"):
        return None
    import math

    if request.pair >= request.width // 2:
        raise StudioError(
            f"pair {request.pair} does not exist: a width of {request.width} has {request.width // 2} pairs."
        )
    frequency = request.base ** (-2 * request.pair / request.width)
    angle = request.offset * frequency
    facts = {"pair": request.pair, "frequency": frequency, "wavelength": 2 * math.pi / frequency}
    return {**facts, "angle": angle, "cos": math.cos(angle), "sin": math.sin(angle)}


def _sinusoidal(
    models: ModelStore, request: schema.Positions, offsets: "Tensor"
) -> "tuple[Tensor, Tensor, dict[str, Any]]":
    import torch

    from glassformer.model.positions import sinusoids

    waves = sinusoids(torch.arange(2 * request.length - 1), request.width, c.Sinusoidal(base=request.base))
    middle = waves[request.length - 1]
    curve = waves @ middle / (middle @ middle)
    return (
        waves[: request.length],
        curve[None],
        {"rows": "position", "columns": "component", "labels": ["p_0 · p_offset"]},
    )


def _rotary(
    models: ModelStore, request: schema.Positions, offsets: "Tensor"
) -> "tuple[Tensor, Tensor, dict[str, Any]]":
    import torch

    from glassformer.model.positions import Rotary, apply_rotation

    rotary = Rotary(c.Rotary(base=request.base), request.width)
    positions = torch.arange(2 * request.length - 1)
    rotation = rotary.rotation(positions[None], torch.float64, len(positions) - 1)
    assert rotation is not None
    rotated = apply_rotation(torch.ones(1, 1, len(positions), request.width, dtype=torch.float64), rotation)[0, 0]
    middle = rotated[request.length - 1]
    curve = rotated @ middle / (middle @ middle)
    heat = rotation.cos[0, 0, : request.length]
    return heat, curve[None], {"rows": "position", "columns": "pair (cosine)", "labels": ["score of equal q and k"]}


def _alibi(models: ModelStore, request: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    import torch

    from glassformer.model.positions import Alibi, alibi_slopes

    positions = torch.arange(request.length)[None]
    bias = Alibi(request.heads).bias(positions, positions, torch.float64)
    assert bias is not None
    slopes = alibi_slopes(request.heads)
    curves = torch.stack([-slope * offsets.abs().double() for slope in slopes])
    labels = [f"head {h}" for h in range(request.heads)]
    return bias[0, 0], curves, {"rows": "query", "columns": "key", "labels": labels, "slopes": slopes}


def _t5(models: ModelStore, request: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    """Return the trained biases of a model with T5 positions; without a model, the bucket of each offset."""
    import torch

    from glassformer.model.positions import t5_buckets

    spec, table = c.T5Bias(), None
    if request.model is not None:
        config, trunk = _trunk(models, request.model)
        if not isinstance(config.position, c.T5Bias):
            raise StudioError(f"{request.model} has {config.position.kind} positions, not T5 bias: leave model out.")
        spec, table = config.position, trunk.position.weight.double()
    causal = request.model is not None and bool(trunk.causal)
    positions = torch.arange(request.length)
    grid = t5_buckets(positions[None, :] - positions[:, None], spec, causal)
    buckets = t5_buckets(offsets, spec, causal)
    if table is None:
        return grid.double(), buckets.double()[None], {"rows": "query", "columns": "key", "labels": ["bucket"]}
    labels = [f"head {h}" for h in range(table.shape[1])]
    return table[grid][:, :, 0], table[buckets].T, {"rows": "query", "columns": "key", "labels": labels}


def _learned(
    models: ModelStore, request: schema.Positions, offsets: "Tensor"
) -> "tuple[Tensor, Tensor, dict[str, Any]]":
    """Return the trained table of a model, and the mean cosine of two rows by their distance."""
    import torch

    if request.model is None:
        raise StudioError("learned positions need a model: name one that has them.")
    config, trunk = _trunk(models, request.model)
    spec = config.learned_positions
    if spec is None:
        raise StudioError(
            f"{request.model} has {config.position.kind} positions, not a learned table: choose another model."
        )
    table = trunk.position.weight.double()[spec.offset :][: request.length]
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosines = unit @ unit.T
    n = len(table)
    curve = torch.stack(
        [cosines.diagonal(int(o)).mean() if abs(int(o)) < n else torch.tensor(float("nan")).double() for o in offsets]
    )
    return table, curve[None], {"rows": "position", "columns": "component", "labels": ["cosine, mean over positions"]}


def _trunk(models: ModelStore, name: str) -> tuple[c.ModelConfig, Any]:
    from glassformer.lens.residual import stack_of

    loaded = models.get(name)
    return loaded.config, stack_of(loaded.model)


_SCHEMES = {"sinusoidal": _sinusoidal, "rotary": _rotary, "alibi": _alibi, "t5": _t5, "learned": _learned}
