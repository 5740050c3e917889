"""Exercises about training a nanoGPT: the loss with its gradient, the backward passes of attention and LayerNorm."""

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax


def cross_entropy(logits: Array, targets: Array, ignored: int) -> tuple[float, Array]:
    """Return (loss, d_logits)."""
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    counted = targets != ignored
    rows = np.flatnonzero(counted)
    count = len(rows)
    loss = -logp[rows, targets[rows]].sum() / count
    d_logits = np.exp(logp)
    d_logits[rows, targets[rows]] -= 1
    d_logits = d_logits * counted[:, None] / count
    return loss, d_logits


def _loss_case(
    rng: np.random.Generator, n: int, V: int, hidden: int, size: float = 1.0, shift: float = 0.0
) -> Arguments:
    targets = rng.integers(0, V, n)
    targets[rng.permutation(n)[:hidden]] = -100
    return {"logits": size * rng.normal(size=(n, V)) + shift, "targets": targets, "ignored": -100}


LOSS = exercise("nano-loss", solve=cross_entropy, draw=_loss_case)


def attention_backward(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, Array, Array]:
    """Return (d_q, d_k, d_v) of causal attention."""
    scale = 1 / np.sqrt(k.shape[-1])
    allowed = np.tri(len(q), dtype=bool)
    p = softmax(np.where(allowed, q @ k.T * scale, -np.inf))
    d_v = p.T @ d_out
    d_p = d_out @ v.T
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    return d_scores @ k, d_scores.T @ q, d_v


def _backward_case(rng: np.random.Generator, T: int, K: int, U: int) -> Arguments:
    shapes = {"q": (T, K), "k": (T, K), "v": (T, U), "d_out": (T, U)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


ATTENTION = exercise("nano-attention-backward", solve=attention_backward, draw=_backward_case)


def norm_backward(x: Array, gain: Array, eps: float, d_y: Array) -> tuple[Array, Array, Array]:
    """Return (d_x, d_gain, d_bias) of layer normalisation."""
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    z = centred / scale
    d_gain = (d_y * z).sum(0)
    d_bias = d_y.sum(0)
    d_z = d_y * gain
    d_x = (d_z - d_z.mean(-1, keepdims=True) - z * (d_z * z).mean(-1, keepdims=True)) / scale
    return d_x, d_gain, d_bias


def _norm_case(rng: np.random.Generator, T: int, d: int, eps: float) -> Arguments:
    arrays = {"x": 2 * rng.normal(size=(T, d)) + 1, "gain": rng.normal(size=d)}
    return {**arrays, "eps": eps, "d_y": rng.normal(size=(T, d))}


NORM = exercise("nano-norm-backward", solve=norm_backward, draw=_norm_case)
