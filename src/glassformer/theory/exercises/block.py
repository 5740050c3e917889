"""Exercises about the block: layer normalisation and the pre-norm block."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Array:
    """gain · (x - mean) / √(variance + eps) + bias, row by row."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return gain * (centred / np.sqrt(variance + eps)) + bias


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
        Mistake(
            "you divide the variance by d - 1 (torch.var's default, ddof=1): LayerNorm divides by d",
            {"(centred**2).mean(-1, keepdims=True)": "(centred**2).sum(-1, keepdims=True) / (x.shape[-1] - 1)"},
        ),
        Mistake(
            "you add eps to the standard deviation: add it to the variance, under the root",
            {"np.sqrt(variance + eps)": "(np.sqrt(variance) + eps)"},
        ),
        Mistake("you leave out eps", {"variance + eps": "variance"}),
        Mistake("you normalise over the positions: normalise each row, along axis -1", {"mean(-1": "mean(0"}),
        Mistake("you do not subtract the mean: that is RMSNorm, not LayerNorm", {"x - x.mean(-1, keepdims=True)": "x"}),
        Mistake(
            "you divide by the variance: divide by its square root", {"np.sqrt(variance + eps)": "(variance + eps)"}
        ),
        Mistake(
            "you add the bias before you multiply by the gain: multiply first, then add",
            {"gain * (centred / np.sqrt(variance + eps)) + bias": "gain * (centred / np.sqrt(variance + eps) + bias)"},
        ),
        Mistake("you leave out gain and bias", {"gain * (": "(", " + bias": ""}),
        Mistake("you leave out the gain", {"gain * (": "("}),
        Mistake(
            "you normalise with one mean and one variance for the whole array: each row has its own",
            {"mean(-1, keepdims=True)": "mean()"},
        ),
        Mistake(
            "brackets are missing: subtract the mean first, then divide the difference",
            {"centred / np.sqrt(": "x - x.mean(-1, keepdims=True) / np.sqrt("},
        ),
        Mistake("you leave out the bias", {" + bias": ""}),
    ),
    inspect=_inspect_norm,
    claims=("preln-block-shape", "residual-stream-sum"),
)


def norm(x: Array, gain: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def attend(x: Array, w_qkv: Array, w_o: Array) -> Array:
    q, k, v = np.split(x @ w_qkv, 3, axis=-1)
    scores = q @ k.T / np.sqrt(k.shape[-1])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    return softmax(scores) @ v @ w_o


def feed(x: Array, w_up: Array, w_down: Array) -> Array:
    return np.maximum(x @ w_up, 0) @ w_down


def block(x: Array, gain_1: Array, w_qkv: Array, w_o: Array, gain_2: Array, w_up: Array, w_down: Array) -> Array:
    """Combine norm, attend and feed, with a norm before each sublayer."""
    x = x + attend(norm(x, gain_1), w_qkv, w_o)
    return x + feed(norm(x, gain_2), w_up, w_down)


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


FIRST = "x = x + attend(norm(x, gain_1), w_qkv, w_o)"
SECOND = "return x + feed(norm(x, gain_2), w_up, w_down)"
PRE_NORM = Exercise(
    id="pre-norm-block",
    title="The pre-norm block",
    problem="""\
Write a pre-norm Transformer block. `norm`, `attend` (causal attention, one head) and `feed` (feed-forward layer) are
given in the stub. Combine them:

  1. Normalise the residual stream with gain_1, apply attention, and add the result to the residual stream.
  2. Normalise the new residual stream with gain_2, apply the feed-forward layer, and add the result.

The residual stream itself is never replaced by its normalised version. Return an array (T, d).""",
    given=("norm", "attend", "feed"),
    solve=block,
    cases=_block_cases,
    returns=("output",),
    mistakes=(
        Mistake(
            "you normalise after adding: that is a post-norm block. Normalise the input of each sublayer",
            {
                FIRST: "x = norm(x + attend(x, w_qkv, w_o), gain_1)",
                SECOND: "return norm(x + feed(x, w_up, w_down), gain_2)",
            },
        ),
        Mistake(
            "both sublayers read the same input: that is a parallel block. The second reads the output of the first",
            {FIRST: "y = attend(norm(x, gain_1), w_qkv, w_o)", "return x + feed": "return x + y + feed"},
        ),
        Mistake(
            "you add to the normalised input: add to the residual stream itself",
            {
                FIRST: "x = norm(x, gain_1)\n    x = x + attend(x, w_qkv, w_o)",
                SECOND: "x = norm(x, gain_2)\n    return x + feed(x, w_up, w_down)",
            },
        ),
        Mistake(
            "you normalise the outputs of the sublayers: normalise their inputs",
            {
                FIRST: "x = x + norm(attend(x, w_qkv, w_o), gain_1)",
                SECOND: "return x + norm(feed(x, w_up, w_down), gain_2)",
            },
        ),
        Mistake(
            "you leave out the residual connection around attention: add its output to x",
            {"x = x + attend": "x = attend"},
        ),
        Mistake(
            "you leave out the residual connection around the feed-forward layer: add its output to its input stream",
            {"return x + feed": "return feed"},
        ),
        Mistake("you leave out the norm before the feed-forward layer", {"norm(x, gain_2)": "x"}),
        Mistake("you use gain_1 for both norms: the second has gain_2", {"norm(x, gain_2)": "norm(x, gain_1)"}),
        Mistake(
            "the feed-forward layer comes before attention: attention is first",
            {
                FIRST: "x = x + feed(norm(x, gain_2), w_up, w_down)",
                SECOND: "return x + attend(norm(x, gain_1), w_qkv, w_o)",
            },
        ),
    ),
    claims=("preln-block-shape", "prenorm-vs-postnorm", "residual-stream-sum"),
    sources=("Ch. 13 ex. 13",),
)
