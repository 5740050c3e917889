"""Positions: one scheme as a heat map, as a curve over relative offsets, and as the turn of one pair."""

from typing import TYPE_CHECKING, Any

from glassformer import config as c
from glassformer.studio import schema
from glassformer.studio.errors import StudioError
from glassformer.studio.shelf import Shelf
from glassformer.studio.wire import Packet

if TYPE_CHECKING:
    from torch import Tensor


def positions(shelf: Shelf, asked: schema.Positions) -> Packet:
    """`map` is one row per position (ALiBi, T5: query by key of one head); `curve` over `offsets` is relative.

    All through the engine's own functions. `offset` is where the query stands for the curve's `at` mark, and the angle
    of the chosen `pair` is turned by it.
    """
    import torch

    offsets = torch.arange(-(asked.length - 1), asked.length)
    heat, curves, meta = _SCHEMES[asked.kind](shelf, asked, offsets)
    angles = _pair(asked)
    tensors = {"map": (heat, "f16"), "offsets": (offsets, "i32"), "curves": (curves, "f32")}
    return Packet(tensors, {"kind": asked.kind, "rotation": angles, **meta})


def _pair(asked: schema.Positions) -> dict[str, float] | None:
    """The turn of one pair by `offset` positions."""
    if asked.kind not in ("rotary", "sinusoidal"):
        return None
    import math

    if asked.pair >= asked.width // 2:
        raise StudioError(f"pair {asked.pair} does not exist: a width of {asked.width} has {asked.width // 2} pairs.")
    frequency = asked.base ** (-2 * asked.pair / asked.width)
    angle = asked.offset * frequency
    facts = {"pair": asked.pair, "frequency": frequency, "wavelength": 2 * math.pi / frequency}
    return {**facts, "angle": angle, "cos": math.cos(angle), "sin": math.sin(angle)}


def _sinusoidal(shelf: Shelf, asked: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    import torch

    from glassformer.model.positions import sinusoids

    waves = sinusoids(torch.arange(2 * asked.length - 1), asked.width, c.Sinusoidal(base=asked.base))
    middle = waves[asked.length - 1]
    curve = waves @ middle / (middle @ middle)
    return (
        waves[: asked.length],
        curve[None],
        {"rows": "position", "columns": "component", "labels": ["p_0 · p_offset"]},
    )


def _rotary(shelf: Shelf, asked: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    import torch

    from glassformer.model.positions import Rotary, apply_rotation

    engine = Rotary(c.Rotary(base=asked.base), asked.width)
    places = torch.arange(2 * asked.length - 1)
    turn = engine.rotation(places[None], torch.float64, len(places) - 1)
    assert turn is not None
    turned = apply_rotation(torch.ones(1, 1, len(places), asked.width, dtype=torch.float64), turn)[0, 0]
    middle = turned[asked.length - 1]
    curve = turned @ middle / (middle @ middle)
    heat = turn.cos[0, 0, : asked.length]
    return heat, curve[None], {"rows": "position", "columns": "pair (cosine)", "labels": ["score of equal q and k"]}


def _alibi(shelf: Shelf, asked: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    import torch

    from glassformer.model.positions import Alibi, alibi_slopes

    places = torch.arange(asked.length)[None]
    bias = Alibi(asked.heads).bias(places, places, torch.float64)
    assert bias is not None
    slopes = alibi_slopes(asked.heads)
    curves = torch.stack([-slope * offsets.abs().double() for slope in slopes])
    labels = [f"head {h}" for h in range(asked.heads)]
    return bias[0, 0], curves, {"rows": "query", "columns": "key", "labels": labels, "slopes": slopes}


def _t5(shelf: Shelf, asked: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    """The trained biases of a model that has them; else the bucket of each offset."""
    import torch

    from glassformer.model.positions import t5_buckets

    spec, table = c.T5Bias(), None
    if asked.model is not None:
        config, trunk = _trunk(shelf, asked.model)
        if not isinstance(config.position, c.T5Bias):
            raise StudioError(f"{asked.model} has {config.position.kind} positions, not T5's: leave model out.")
        spec, table = config.position, trunk.position.weight.double()
    causal = asked.model is not None and bool(trunk.causal)
    places = torch.arange(asked.length)
    grid = t5_buckets(places[None, :] - places[:, None], spec, causal)
    buckets = t5_buckets(offsets, spec, causal)
    if table is None:
        return grid.double(), buckets.double()[None], {"rows": "query", "columns": "key", "labels": ["bucket"]}
    labels = [f"head {h}" for h in range(table.shape[1])]
    return table[grid][:, :, 0], table[buckets].T, {"rows": "query", "columns": "key", "labels": labels}


def _learned(shelf: Shelf, asked: schema.Positions, offsets: "Tensor") -> "tuple[Tensor, Tensor, dict[str, Any]]":
    """The trained table of a model, and the cosine of two rows by their distance, mean over places."""
    import torch

    if asked.model is None:
        raise StudioError("learned positions are a model's own: name one that has them.")
    config, trunk = _trunk(shelf, asked.model)
    spec = config.learned_positions
    if spec is None:
        raise StudioError(
            f"{asked.model} has {config.position.kind} positions, no learned table: choose another model."
        )
    table = trunk.position.weight.double()[spec.offset :][: asked.length]
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosines = unit @ unit.T
    n = len(table)
    curve = torch.stack(
        [cosines.diagonal(int(o)).mean() if abs(int(o)) < n else torch.tensor(float("nan")).double() for o in offsets]
    )
    return table, curve[None], {"rows": "position", "columns": "component", "labels": ["cosine, mean over places"]}


def _trunk(shelf: Shelf, name: str) -> tuple[c.ModelConfig, Any]:
    from glassformer.lens.residual import stack_of

    loaded = shelf.get(name)
    return loaded.config, stack_of(loaded.model)


_SCHEMES = {"sinusoidal": _sinusoidal, "rotary": _rotary, "alibi": _alibi, "t5": _t5, "learned": _learned}
