"""Views of position schemes: a model's own, or four schemes by their formulas, computed by the model's functions."""

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.lens import figures
from glassformer.lens.residual import stack_of
from glassformer.lens.sites import LensError
from glassformer.lens.views.subject import Choice, Subject, View, pick
from glassformer.model.positions import Rotary, alibi_slopes, apply_rotation, sinusoids, t5_buckets

REACH = 128
"""Number of positions or offsets shown for a scheme without a maximum length."""


def positions(subject: Subject, choice: Choice) -> View:
    """Show the position scheme of the model, or the four schemes by their formulas."""
    option = pick("positions", choice, "model", "sinusoidal", "schemes")
    if option == "schemes":
        return _schemes()
    if option == "sinusoidal":
        return _vectors("Sinusoidal positions", sinusoids(torch.arange(REACH), 64, c.Sinusoidal()))
    model, config = subject.model, subject.model.config
    stack = stack_of(model)
    causal = not isinstance(config, c.EncoderConfig)
    last = min(REACH, config.max_len or REACH) - 1
    offsets = torch.arange(-last, 1 if causal else last + 1)
    match config.position:
        case c.NoPosition():
            raise LensError(
                f"{subject.name} has no position scheme: a decoder without one knows the order only through its mask."
            )
        case c.Learned(offset=first) | c.QueryKeyPosition(vectors=c.Learned(offset=first)):
            return _vectors(f"{subject.name}: learned positions", stack.position.weight[first:].detach())  # type: ignore[index]
        case c.Sinusoidal() as waves:
            return _vectors(
                f"{subject.name}: sinusoidal positions", sinusoids(torch.arange(last + 1), config.position_width, waves)
            )
        case c.QueryKeyPosition(vectors=c.Sinusoidal() as waves):
            title = f"{subject.name}: sinusoidal positions, read by queries and keys only"
            return _vectors(title, sinusoids(torch.arange(last + 1), config.d_model, waves))
        case c.Rotary() as spec:
            return _offsets(
                subject.name,
                offsets,
                {"rotary: score of equal q and k, relative": _rotary(spec, config.d_head, offsets)},
            )
        case _:
            query = torch.tensor([[last]])
            bias = stack.position.bias(query, query + offsets[None], torch.float64)
            assert bias is not None  # the schemes that add to the scores
            lines = {f"{config.position.title}: added to the score, one line per head": bias[0, :, 0].detach()}
            return _offsets(subject.name, offsets, lines)


def _vectors(title: str, vectors: Tensor) -> View:
    heading = f"{title}: one row per position"
    return View({"vectors": vectors.tolist()}, lambda: figures.position_heatmap(vectors, title=heading))


def _offsets(name: str, offsets: Tensor, curves: dict[str, Tensor]) -> View:
    title = f"{name}: how a score depends on the distance between two tokens"
    numbers = {"offsets": offsets.tolist(), "curves": {n: line.tolist() for n, line in curves.items()}}
    return View(numbers, lambda: figures.relative_offset(offsets, curves, title=title))


def _rotary(spec: c.Rotary, d_head: int, offsets: Tensor) -> Tensor:
    """Return q·k / |q||k| after rotation, for q = k = (1, ..., 1) at two positions, by the model's own rotation."""
    engine = Rotary(spec, d_head)
    indices = offsets - offsets.min()  # positions are not negative
    rotation = engine.rotation(indices[None], torch.float64, int(indices.max()))
    assert rotation is not None
    ones = torch.ones(1, 1, len(indices), d_head, dtype=torch.float64)
    rotated = apply_rotation(ones, rotation)[0, 0]
    query = rotated[offsets.tolist().index(0)]
    return rotated @ query / (query @ query)


def _schemes() -> View:
    """Show sinusoidal, rotary, ALiBi and T5 positions by the model's formulas, with width 64 and 8 heads."""
    offsets = torch.arange(-REACH, REACH + 1)
    waves = sinusoids(torch.arange(2 * REACH + 1), 64, c.Sinusoidal())
    slopes = torch.tensor(alibi_slopes(8), dtype=torch.float64)
    curves = {
        "sinusoidal: dot product of two positions": waves @ waves[REACH],
        "rotary: score of equal q and k, relative": _rotary(c.Rotary(), 64, offsets),
        "ALiBi: added to the score": -slopes[:, None] * offsets.abs(),
        "T5: bucket, one learned number each": t5_buckets(offsets, c.T5Bias(), causal=False).double(),
    }
    return _offsets("four schemes", offsets, curves)
