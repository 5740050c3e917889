"""Exercises about the block: layer normalisation and the pre-norm block."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Array:
    """gain · (x - mean) / √(variance + eps) + bias, row by row."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return gain * (centred / np.sqrt(variance + eps)) + bias


def _norm_case(rng: np.random.Generator, T: int, d: int, size: float = 1.0, eps: float = 1e-5) -> Arguments:
    x = size * rng.normal(size=(T, d)) + rng.normal()
    return {"x": x, "gain": rng.normal(size=d), "bias": rng.normal(size=d), "eps": eps}


def _inspect_norm(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    hint = "your result contains NaN or infinity: add eps to the variance, so that you never divide by 0"
    return "" if np.isfinite(values[0]).all() else hint


NORM = exercise("layer-norm", solve=layer_norm, draw=_norm_case, inspect=_inspect_norm)


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


def _block_case(rng: np.random.Generator, T: int, d: int, f: int) -> Arguments:
    w = {
        "gain_1": 1 + 0.3 * rng.normal(size=d),
        "w_qkv": rng.normal(size=(d, 3 * d)) / d**0.5,
        "w_o": rng.normal(size=(d, d)) / d**0.5,
        "gain_2": 1 + 0.3 * rng.normal(size=d),
        "w_up": rng.normal(size=(d, f)) / d**0.5,
        "w_down": rng.normal(size=(f, d)) / f**0.5,
    }
    return {"x": 2 * rng.normal(size=(T, d)), **w}


PRE_NORM = exercise("pre-norm-block", solve=block, draw=_block_case)
