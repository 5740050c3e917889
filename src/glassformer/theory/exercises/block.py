"""Exercises about the block: layer normalisation and the pre-norm block."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, exercise, softmax


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


NORM = exercise("layer-norm", solve=layer_norm, cases=_norm_cases, inspect=_inspect_norm)


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


PRE_NORM = exercise("pre-norm-block", solve=block, cases=_block_cases)
