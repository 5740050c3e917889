"""Exercises about the block: layer normalisation and the pre-norm block."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Case, Exercise, Mistake, softmax

Array = np.ndarray


def layer_norm(
    x: Array,
    gain: Array,
    bias: Array,
    eps: float,
    *,
    ddof: int = 0,
    eps_at: str = "inside",
    axis: int = -1,
    centre: bool = True,
    power: float = 0.5,
    affine: str = "both",
) -> Array:
    """gain · (x - mean) / √(variance + eps) + bias, row by row."""
    mean = x.mean(axis, keepdims=True) if centre else 0.0
    variance = ((x - mean) ** 2).sum(axis, keepdims=True) / max(x.shape[axis] - ddof, 1)
    spread = {"inside": (variance + eps) ** power, "outside": variance**power + eps, "none": variance**power}[eps_at]
    with np.errstate(invalid="ignore", divide="ignore"):
        normal = (x - mean) / spread
    shapes = {"both": gain * normal + bias, "first": gain * (normal + bias), "none": normal, "gain": gain * normal}
    return np.asarray(shapes[affine])


def _norm_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, d: int, size: float = 1.0, eps: float = 1e-5, hint: str = "") -> Case:
        x = size * rng.normal(size=(T, d)) + rng.normal()
        return Case(label, {"x": x, "gain": rng.normal(size=d), "bias": rng.normal(size=d), "eps": eps}, hint)

    flat = {"x": np.full((2, 4), 3.0), "gain": np.ones(4), "bias": np.arange(4.0), "eps": 1e-5}
    return [
        made("5 rows of width 8", 5, 8),
        made("square input", 4, 4, 3.0),
        made("one row", 1, 6),
        made("tiny rows and a large eps", 3, 5, 1e-2, 1e-2, "add eps to the variance, under the square root"),
        Case(
            "rows whose entries are all equal",
            flat,
            "the variance is 0, and eps prevents a division by 0: the result is the bias",
        ),
    ]


def _inspect_norm(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    hint = "your result contains NaN or infinity: add eps to the variance, so that you never divide by 0"
    return "" if np.isfinite(values[0]).all() else hint


NORM = Exercise(
    id="layer-norm",
    title="Layer normalisation",
    problem="""\
Normalise each row of x (T, d): subtract its mean, divide by √(variance + eps), multiply by `gain` (d) and add `bias`
(d). The variance is the mean of the squared deviations from the mean (divide by d, not by d - 1). Return an array
(T, d).""",
    solve=layer_norm,
    cases=_norm_cases,
    returns=("normalised",),
    mistakes=(
        Mistake("you divide the variance by d - 1 (torch.var's default, ddof=1): LayerNorm divides by d", {"ddof": 1}),
        Mistake("you add eps to the standard deviation: add it to the variance, under the root", {"eps_at": "outside"}),
        Mistake("you leave out eps", {"eps_at": "none"}),
        Mistake("you normalise over the positions: normalise each row, along axis -1", {"axis": 0}),
        Mistake("you do not subtract the mean: that is RMSNorm, not LayerNorm", {"centre": False}),
        Mistake("you divide by the variance: divide by its square root", {"power": 1.0}),
        Mistake("you add the bias before you multiply by the gain: multiply first, then add", {"affine": "first"}),
        Mistake("you leave out gain and bias", {"affine": "none"}),
        Mistake("you leave out the bias", {"affine": "gain"}),
    ),
    inspect=_inspect_norm,
    claims=("preln-block-shape", "residual-stream-sum"),
)


def _normed(x: Array, gain: Array) -> Array:
    return gain * layer_norm(x, np.ones(x.shape[-1]), np.zeros(x.shape[-1]), 1e-5)


def _attend(x: Array, w_qkv: Array, w_o: Array) -> Array:
    q, k, v = np.split(x @ w_qkv, 3, axis=-1)
    scores = np.where(np.tri(len(x), dtype=bool), q @ k.T / q.shape[-1] ** 0.5, -np.inf)
    return np.asarray(softmax(scores) @ v @ w_o)


def _feed(x: Array, w_up: Array, w_down: Array) -> Array:
    return np.asarray(np.maximum(x @ w_up, 0) @ w_down)


def block(
    x: Array,
    gain_1: Array,
    w_qkv: Array,
    w_o: Array,
    gain_2: Array,
    w_up: Array,
    w_down: Array,
    *,
    wiring: str = "pre",
    first: bool = True,
    second: bool = True,
    norm_2: str = "own",
    order: str = "attention",
) -> Array:
    """Combine norm, attend and feed, with a norm before each sublayer."""

    def attend(y: Array) -> Array:
        return _attend(y, w_qkv, w_o)

    def feed(y: Array) -> Array:
        return _feed(y, w_up, w_down)

    again = {"own": gain_2, "shared": gain_1}.get(norm_2)
    if order == "feedforward":
        y = x + feed(_normed(x, gain_2))
        return y + attend(_normed(y, gain_1))
    if wiring == "post":
        y = _normed(x + attend(x), gain_1)
        return _normed(y + feed(y), gain_2)
    if wiring == "parallel":
        return x + attend(_normed(x, gain_1)) + feed(_normed(x, gain_2))
    if wiring == "normed stream":  # the sublayer is added to the normalised input
        n = _normed(x, gain_1)
        y = n + attend(n)
        n = _normed(y, gain_2)
        return n + feed(n)
    if wiring == "after":  # the sublayer's output is normalised, not its input
        y = x + _normed(attend(x), gain_1)
        return y + _normed(feed(y), gain_2)
    y = attend(_normed(x, gain_1)) + (x if first else 0)
    return np.asarray(feed(_normed(y, again) if again is not None else y) + (y if second else 0))


def _block_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, d: int, f: int) -> Case:
        w = {
            "gain_1": 1 + 0.3 * rng.normal(size=d),
            "w_qkv": rng.normal(size=(d, 3 * d)) / d**0.5,
            "w_o": rng.normal(size=(d, d)) / d**0.5,
            "gain_2": 1 + 0.3 * rng.normal(size=d),
            "w_up": rng.normal(size=(d, f)) / d**0.5,
            "w_down": rng.normal(size=(f, d)) / f**0.5,
        }
        return Case(label, {"x": 2 * rng.normal(size=(T, d)), **w})

    return [made("5 positions of width 6", 5, 6, 24), made("one position", 1, 4, 16), made("width 3", 7, 3, 5)]


PRE_NORM = Exercise(
    id="pre-norm-block",
    title="The pre-norm block",
    problem="""\
Write a pre-norm Transformer block. `norm`, `attend` (causal attention, one head) and `feed` (feed-forward layer) are
given in the stub. Combine them:

  1. Normalise the residual stream with gain_1, apply attention, and add the result to the residual stream.
  2. Normalise the new residual stream with gain_2, apply the feed-forward layer, and add the result.

The residual stream itself is never replaced by its normalised version. Return an array (T, d).""",
    given="""import numpy as np


def norm(x, gain):
    x = x - x.mean(-1, keepdims=True)
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def attend(x, w_qkv, w_o):
    q, k, v = np.split(x @ w_qkv, 3, axis=-1)
    scores = q @ k.T / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v @ w_o


def feed(x, w_up, w_down):
    return np.maximum(x @ w_up, 0) @ w_down
""",
    solve=block,
    cases=_block_cases,
    returns=("output",),
    mistakes=(
        Mistake(
            "you normalise after adding: that is a post-norm block. Normalise the input of each sublayer",
            {"wiring": "post"},
        ),
        Mistake(
            "both sublayers read the same input: that is a parallel block. The second reads the output of the first",
            {"wiring": "parallel"},
        ),
        Mistake("you add to the normalised input: add to the residual stream itself", {"wiring": "normed stream"}),
        Mistake("you normalise the outputs of the sublayers: normalise their inputs", {"wiring": "after"}),
        Mistake("you leave out the residual connection around attention: add its output to x", {"first": False}),
        Mistake(
            "you leave out the residual connection around the feed-forward layer: add its output to its input stream",
            {"second": False},
        ),
        Mistake("you leave out the norm before the feed-forward layer", {"norm_2": "none"}),
        Mistake("you use gain_1 for both norms: the second has gain_2", {"norm_2": "shared"}),
        Mistake("the feed-forward layer comes before attention: attention is first", {"order": "feedforward"}),
    ),
    claims=("preln-block-shape", "prenorm-vs-postnorm", "residual-stream-sum"),
)
