"""Exercises about training a nanoGPT, in stages: batches, optimizer, schedule, the whole run."""

from collections.abc import Sequence

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake

CLAIMS = ("train-nano-gpt",)
SOURCES = ("Ch. 13 ex. 20",)


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


BATCH = Exercise(
    id="nano-batch",
    title="nanoGPT, stage 1: a batch",
    problem="""\
Cut a batch of training sequences out of a long text. The target of a position is the token that follows it.

  tokens      the text, an array of token ids
  starts      B positions of the text where the sequences begin
  length      the length T of the sequences

Return the inputs (B, T) and the targets (B, T).""",
    solve=batch,
    cases=_batch_cases,
    returns=("inputs", "targets"),
    mistakes=(
        Mistake(
            "your targets are the inputs: the model would learn to copy. The target is the next token",
            {"tokens[s + 1 : s + 1 + length]": "tokens[s : s + length]"},
        ),
        Mistake(
            "your targets are the previous tokens: the target of a position is the token after it",
            {"tokens[s + 1 : s + 1 + length]": "tokens[s - 1 : s - 1 + length]"},
        ),
        Mistake("you swapped inputs and targets", {"return inputs, targets": "return targets, inputs"}),
        Mistake(
            "your targets wrap around inside the sequence (np.roll): the last one is the next token of the text",
            {"np.stack([tokens[s + 1 : s + 1 + length] for s in starts])": "np.roll(inputs, -1, axis=1)"},
        ),
        Mistake(
            "your arrays are transposed: one row per sequence", {"return inputs, targets": "return inputs.T, targets.T"}
        ),
        Mistake(
            "your sequences are one token too short: take `length` inputs and as many targets",
            {"tokens[s : s + length]": "tokens[s : s + length - 1]", "s + 1 + length]": "s + length]"},
        ),
    ),
    claims=CLAIMS,
    sources=SOURCES,
    whole=True,
)


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


DECAY = "    w = w - lr * decay * w\n"
MOVE = "    w = w - lr * m_hat / (np.sqrt(v_hat) + eps)\n"
ADAMW = Exercise(
    id="nano-adamw",
    title="nanoGPT, stage 5: one step of AdamW",
    problem="""\
Take one step of AdamW on the weights w with the gradient g.

  m, v                    running means of the gradient and of its square, 0 before the first step
  step                    1 for the first step
  lr, beta1, beta2, eps   hyperparameters
  decay                   weight decay, decoupled from the gradient: w shrinks by the factor 1 - lr · decay

m becomes beta1 · m + (1 - beta1) · g, and v the same with beta2 and g². Both are divided by 1 - beta^step to correct
their start at 0. Then w moves by -lr · m̂ / (√v̂ + eps), after the decay.

Return the new w, m and v (without the correction). Do not modify the arguments.""",
    solve=adamw,
    cases=_adamw_cases,
    returns=("w", "m", "v"),
    mistakes=(
        Mistake(
            "you leave out the bias correction: divide m and v by 1 - beta^step",
            {" / (1 - beta1**step)": "", " / (1 - beta2**step)": ""},
        ),
        Mistake(
            "you add the decay to the gradient (Adam with L2): in AdamW it acts on the weights alone",
            {"    w = w - lr * decay * w\n": "", "    m = beta1": "    g = g + decay * w\n    m = beta1"},
        ),
        Mistake("you leave out the weight decay", {"    w = w - lr * decay * w\n": ""}),
        Mistake("you do not multiply the decay by lr", {"lr * decay * w": "decay * w"}),
        Mistake("you add eps under the root: add it to the root", {"(np.sqrt(v_hat) + eps)": "np.sqrt(v_hat + eps)"}),
        Mistake("you forget the root: divide by √v̂", {"(np.sqrt(v_hat) + eps)": "(v_hat + eps)"}),
        Mistake("you average g, not its square, in v", {"(1 - beta2) * g**2": "(1 - beta2) * g"}),
        Mistake(
            "you return the corrected m and v: they would be corrected again in the next step",
            {"return w, m, v": "return w, m_hat, v_hat"},
        ),
        Mistake("you climb: subtract the step", {"w = w - lr * m_hat": "w = w + lr * m_hat"}),
        Mistake("you apply the decay after the step: shrink the weights first", {f"{DECAY}{MOVE}": f"{MOVE}{DECAY}"}),
        Mistake(
            "you multiply beta by the step in the correction: raise it to that power",
            {"beta1**step": "beta1 * step", "beta2**step": "beta2 * step"},
        ),
        Mistake(
            "you swap beta and 1 - beta: most of the running mean is kept",
            {
                "beta1 * m + (1 - beta1) * g": "(1 - beta1) * m + beta1 * g",
                "beta2 * v + (1 - beta2) * g**2": "(1 - beta2) * v + beta2 * g**2",
            },
        ),
    ),
    claims=CLAIMS,
    sources=SOURCES,
)


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


SCHEDULE = Exercise(
    id="nano-schedule",
    title="nanoGPT, stage 6: the learning rate",
    problem="""\
Return the learning rate of a step, counted from 0, with a linear warm-up and a cosine decay.

  steps       the number of steps of the run
  warmup      the number of steps of the warm-up, possibly 0
  peak        the largest learning rate
  floor       the learning rate at the end of the decay

In the warm-up the rate is peak · (step + 1) / warmup, so that the first step is not wasted with a rate of 0. After it,
with the fraction done = (step - warmup) / (steps - warmup), the rate is

  floor + (peak - floor) · (1 + cos(π · done)) / 2""",
    solve=learning_rate,
    cases=_schedule_cases,
    returns=("rate",),
    mistakes=(
        Mistake(
            "your first rate is 0: the warm-up is peak · (step + 1) / warmup", {"(step + 1) / warmup": "step / warmup"}
        ),
        Mistake(
            "you leave out the warm-up",
            {"step < warmup": "False", "(step - warmup) / (steps - warmup)": "step / steps"},
        ),
        Mistake(
            "you begin the decay at step 0: the fraction done begins after the warm-up",
            {"(step - warmup) / (steps - warmup)": "step / steps"},
        ),
        Mistake("you decay to 0: the rate ends at `floor`", {"floor + (peak - floor)": "peak"}),
        Mistake("you add the floor to the whole peak: the cosine goes from peak to floor", {"(peak - floor)": "peak"}),
        Mistake("you decay linearly: use the cosine", {"(1 + np.cos(np.pi * done)) / 2": "(1 - done)"}),
        Mistake("your cosine runs over a whole period: use π · done", {"np.pi * done": "2 * np.pi * done"}),
    ),
    claims=CLAIMS,
    sources=SOURCES,
)
