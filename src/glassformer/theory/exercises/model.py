"""Exercises about whole models: a GPT with its logits, a tied head, an encoder from a decoder, weights of GPT-2."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax

Weights = dict[str, Any]


def norm(x: Array, gain: Array, bias: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) + bias


def attend(x: Array, w: Weights, n_heads: int) -> Array:
    T, D = x.shape
    names = ("query", "key", "value")
    q, k, v = (x @ w[name].T + w[name + "_bias"] for name in names)
    q, k, v = (y.reshape(T, n_heads, -1).transpose(1, 0, 2) for y in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(k.shape[-1])
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    heads = (softmax(scores) @ v).transpose(1, 0, 2).reshape(T, D)
    return heads @ w["output"].T + w["output_bias"]


def feed(x: Array, w: Weights) -> Array:
    y = x @ w["up"].T + w["up_bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return y @ w["down"].T + w["down_bias"]


def gpt(tokens: list[int], weights: Weights, n_heads: int) -> Array:
    """Return the logits of every position, (T, V)."""
    x = weights["tokens"][tokens] + weights["positions"][: len(tokens)]
    for b in weights["blocks"]:
        x = x + attend(norm(x, b["gain_1"], b["bias_1"]), b, n_heads)
        x = x + feed(norm(x, b["gain_2"], b["bias_2"]), b)
    x = norm(x, weights["gain"], weights["bias"])
    return x @ weights["head"]


def _block(rng: np.random.Generator, D: int, F: int) -> Weights:
    """Return the weights of one block; matrices are stored output by input."""
    shapes = {"query": (D, D), "key": (D, D), "value": (D, D), "output": (D, D), "up": (F, D), "down": (D, F)}
    w: Weights = {name: 1.5 * rng.normal(size=shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    w |= {f"{name}_bias": 0.3 * rng.normal(size=shape[0]) for name, shape in shapes.items()}
    w |= {f"gain_{n}": 1 + 0.3 * rng.normal(size=D) for n in (1, 2)}
    return w | {f"bias_{n}": 0.3 * rng.normal(size=D) for n in (1, 2)}


def _gpt_case(rng: np.random.Generator, T: int, V: int, D: int, n_heads: int, layers: int, context: int) -> Arguments:
    weights = {
        "tokens": rng.normal(size=(V, D)),
        "positions": rng.normal(size=(context, D)),
        "blocks": [_block(rng, D, 2 * D) for _ in range(layers)],
        "gain": 1 + 0.3 * rng.normal(size=D),
        "bias": 0.3 * rng.normal(size=D),
        "head": rng.normal(size=(D, V)),
    }
    return {"tokens": [int(t) for t in rng.integers(0, V, T)], "weights": weights, "n_heads": n_heads}


GPT = exercise("gpt", solve=gpt, draw=_gpt_case)


def tied_head(tokens: list[int], hidden: Array, table: Array, d_logits: Array, d_x: Array) -> tuple[Array, Array, int]:
    """Return (logits, d_table, saved)."""
    logits = hidden @ table.T
    d_table = d_logits.T @ hidden
    np.add.at(d_table, tokens, d_x)
    return logits, d_table, table.size


def _tied_case(rng: np.random.Generator, V: int, D: int, tokens: Sequence[int] = ()) -> Arguments:
    tokens = list(tokens) or [int(t) for t in rng.permutation(V)[:4]]
    T = len(tokens)
    shapes = {"hidden": (T, D), "table": (V, D), "d_logits": (T, V), "d_x": (T, D)}
    return {"tokens": tokens, **{name: rng.normal(size=shape) for name, shape in shapes.items()}}


TIED = exercise("tied-head", solve=tied_head, draw=_tied_case)


def masked_attention(x: Array, w_qkv: Array, real: Array, causal: bool) -> Array:
    """Return the attention weights, (T, T)."""
    q, k, _ = np.split(x @ w_qkv, 3, axis=-1)
    scores = q @ k.T / np.sqrt(k.shape[-1])
    allowed = np.tile(real, (len(x), 1))
    if causal:
        allowed = allowed & np.tri(len(x), dtype=bool)
    return softmax(np.where(allowed, scores, -np.inf))


def _masked_case(rng: np.random.Generator, T: int, D: int, padded: int, causal: bool) -> Arguments:
    x, w_qkv = rng.normal(size=(T, D)), rng.normal(size=(D, 3 * D)) / D**0.5
    return {"x": x, "w_qkv": w_qkv, "real": np.arange(T) < T - padded, "causal": causal}


ENCODER = exercise("encoder-from-decoder", solve=masked_attention, draw=_masked_case)
