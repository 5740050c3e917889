"""Exercises about training a nanoGPT, in stages: batches, optimizer, schedule, the whole run."""

from collections.abc import Sequence

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, exercise


def batch(tokens: Array, starts: Sequence[int] | Array, length: int) -> tuple[Array, Array]:
    """Return (inputs, targets), each (B, length)."""
    inputs = np.stack([tokens[s : s + length] for s in starts])
    targets = np.stack([tokens[s + 1 : s + 1 + length] for s in starts])
    return inputs, targets


def _batch_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, n: int, B: int, length: int) -> Case:
        starts = [int(s) for s in rng.integers(2, n - length - 2, B)]
        return Case(label, {"tokens": rng.permutation(n), "starts": starts, "length": length})

    end = Case("a sequence at the very end", {"tokens": rng.permutation(9), "starts": [4, 1, 2, 3], "length": 4})
    return [made("3 sequences of 4 tokens", 30, 3, 4), made("5 sequences of 5 tokens", 40, 5, 5), end]


BATCH = exercise("nano-batch", solve=batch, cases=_batch_cases)


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


def _adamw_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, step: int, decay: float, eps: float = 1e-3) -> Case:
        w, g, m = rng.normal(size=(3, 3, 4))
        v = rng.uniform(0.1, 2, (3, 4))
        if step == 1:
            m, v = np.zeros((3, 4)), np.zeros((3, 4))
        numbers = {"step": step, "lr": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": eps, "decay": decay}
        return Case(label, {"w": w, "g": g, "m": m, "v": v, **numbers})

    return [made("the first step", 1, 0.1), made("step 7", 7, 0.1), made("step 1000 without decay", 1000, 0.0)]


ADAMW = exercise("nano-adamw", solve=adamw, cases=_adamw_cases)


def learning_rate(step: int, steps: int, warmup: int, peak: float, floor: float) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return floor + (peak - floor) * (1 + np.cos(np.pi * done)) / 2


def _schedule_cases(rng: np.random.Generator) -> list[Case]:
    peak = float(rng.uniform(0.5, 2) * 1e-3)
    return [
        Case(
            f"step {step} of 100, warm-up {warmup}",
            {"step": step, "steps": 100, "warmup": warmup, "peak": peak, "floor": peak / 10},
        )
        for step, warmup in ((0, 10), (4, 10), (9, 10), (10, 10), (37, 10), (99, 10), (0, 0), (80, 20))
    ]


SCHEDULE = exercise("nano-schedule", solve=learning_rate, cases=_schedule_cases)
