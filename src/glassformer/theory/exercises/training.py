"""Exercises about training a nanoGPT, in stages: batches, optimizer, schedule, the whole run."""

from collections.abc import Sequence

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise


def batch(tokens: Array, starts: Sequence[int] | Array, length: int) -> tuple[Array, Array]:
    """Return (inputs, targets), each (B, length)."""
    inputs = np.stack([tokens[s : s + length] for s in starts])
    targets = np.stack([tokens[s + 1 : s + 1 + length] for s in starts])
    return inputs, targets


def _batch_case(
    rng: np.random.Generator, n: int, length: int, sequences: int = 0, starts: Sequence[int] = ()
) -> Arguments:
    starts = list(starts) or [int(s) for s in rng.integers(2, n - length - 2, sequences)]
    return {"tokens": rng.permutation(n), "starts": starts, "length": length}


BATCH = exercise("nano-batch", solve=batch, draw=_batch_case)


def adamw(
    w: Array, g: Array, m: Array, v: Array, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float
) -> tuple[Array, Array, Array]:
    """Return (w, m, v) after one step."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    w = w - lr * decay * w
    w = w - lr * m_hat / (np.sqrt(v_hat) + eps)
    return w, m, v


def _adamw_case(rng: np.random.Generator, step: int, decay: float) -> Arguments:
    w, g, m = rng.normal(size=(3, 3, 4))
    v = rng.uniform(0.1, 2, (3, 4))
    if step == 1:
        m, v = np.zeros((3, 4)), np.zeros((3, 4))
    numbers = {"step": step, "lr": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "decay": decay}
    return {"w": w, "g": g, "m": m, "v": v, **numbers}


ADAMW = exercise("nano-adamw", solve=adamw, draw=_adamw_case)


def learning_rate(step: int, steps: int, warmup: int, peak: float, floor: float) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return floor + (peak - floor) * (1 + np.cos(np.pi * done)) / 2


def _schedule_case(rng: np.random.Generator, step: int, warmup: int) -> Arguments:
    peak = float(rng.uniform(0.5, 2) * 1e-3)
    return {"step": step, "steps": 100, "warmup": warmup, "peak": peak, "floor": peak / 10}


SCHEDULE = exercise("nano-schedule", solve=learning_rate, draw=_schedule_case)
