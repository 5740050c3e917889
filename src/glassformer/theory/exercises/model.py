"""Exercises about whole models: a GPT with its logits, a tied head, an encoder from a decoder, weights of GPT-2."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, exercise, softmax

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


def _gpt_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, V: int, D: int, heads: int, layers: int, context: int) -> Case:
        weights = {
            "tokens": rng.normal(size=(V, D)),
            "positions": rng.normal(size=(context, D)),
            "blocks": [_block(rng, D, 2 * D) for _ in range(layers)],
            "gain": 1 + 0.3 * rng.normal(size=D),
            "bias": 0.3 * rng.normal(size=D),
            "head": rng.normal(size=(D, V)),
        }
        return Case(label, {"tokens": [int(t) for t in rng.integers(0, V, T)], "weights": weights, "n_heads": heads})

    return [
        made("6 tokens, 2 layers, 2 heads", 6, 11, 8, 2, 2, 9),
        made("as many tokens as positions", 5, 7, 6, 3, 3, 5),
        made("one token, one layer", 1, 5, 4, 2, 1, 6),
    ]


GPT = exercise("gpt", solve=gpt, cases=_gpt_cases)


def tied_head(tokens: list[int], hidden: Array, table: Array, d_logits: Array, d_x: Array) -> tuple[Array, Array, int]:
    """Return (logits, d_table, saved)."""
    logits = hidden @ table.T
    d_table = d_logits.T @ hidden
    np.add.at(d_table, tokens, d_x)
    return logits, d_table, table.size


def _tied_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, tokens: list[int], V: int, D: int, hint: str = "") -> Case:
        T = len(tokens)
        arrays = {name: rng.normal(size=shape) for name, shape in
                  {"hidden": (T, D), "table": (V, D), "d_logits": (T, V), "d_x": (T, D)}.items()}  # fmt: skip
        return Case(label, {"tokens": tokens, **arrays}, hint)

    twice = "a token that occurs several times gets the gradients of all its occurrences"
    return [
        made("4 different tokens", [int(t) for t in rng.permutation(9)[:4]], 9, 5),
        made("a token that occurs three times", [2, 5, 2, 0, 2], 7, 4, twice),
        made("as many tokens as components", [1, 3, 0], 6, 3),
    ]


TIED = exercise("tied-head", solve=tied_head, cases=_tied_cases)


def masked_attention(x: Array, w_qkv: Array, real: Array, causal: bool) -> Array:
    """Return the attention weights, (T, T)."""
    q, k, _ = np.split(x @ w_qkv, 3, axis=-1)
    scores = q @ k.T / np.sqrt(k.shape[-1])
    allowed = np.tile(real, (len(x), 1))
    if causal:
        allowed = allowed & np.tri(len(x), dtype=bool)
    return softmax(np.where(allowed, scores, -np.inf))


def _masked_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, D: int, padded: int, causal: bool) -> Case:
        return Case(label, {"x": rng.normal(size=(T, D)), "w_qkv": rng.normal(size=(D, 3 * D)) / D**0.5,
                            "real": np.arange(T) < T - padded, "causal": causal})  # fmt: skip

    return [
        made("an encoder with padding", 6, 4, 2, False),
        made("a decoder with padding", 6, 4, 2, True),
        made("an encoder without padding", 5, 3, 0, False),
        made("a decoder without padding", 5, 3, 0, True),
    ]


ENCODER = exercise("encoder-from-decoder", solve=masked_attention, cases=_masked_cases)
