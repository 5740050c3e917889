"""Exercises about training a nanoGPT: the loss with its gradient, the backward passes of attention and LayerNorm."""

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax

CLAIMS = ("train-nano-gpt",)
SOURCES = ("Ch. 13 ex. 20",)


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


def _loss_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, n: int, V: int, hidden: int, size: float = 1.0, shift: float = 0.0, hint: str = "") -> Case:
        targets = rng.integers(0, V, n)
        targets[rng.permutation(n)[:hidden]] = -100
        return Case(
            label, {"logits": size * rng.normal(size=(n, V)) + shift, "targets": targets, "ignored": -100}, hint
        )

    return [
        made("6 positions, 5 tokens", 6, 5, 0),
        made("8 positions, 3 of them ignored", 8, 7, 3),
        made("logits around 2000", 4, 5, 1, 3.0, 2000.0, "exp overflows: subtract each row's maximum first"),
    ]


LOSS = Exercise(
    id="nano-loss",
    title="nanoGPT, stage 2: the loss and its gradient",
    problem="""\
Compute the cross-entropy of predictions and its gradient with respect to the logits.

  logits (N, V)     one row for each position
  targets (N)       token ids, or `ignored` (-100) for positions that do not count, such as padding

The loss is the mean of -ln softmax(logits)[target] over the positions that count. The gradient of a counted row is
softmax minus the one-hot vector of the target, divided by the number of counted positions; that of an ignored row is 0.

Return the loss and the gradient (N, V). Logits may be large.""",
    solve=cross_entropy,
    cases=_loss_cases,
    returns=("loss", "d_logits"),
    mistakes=(
        Mistake("you add up the losses: take their mean", {"count = len(rows)": "count = 1"}),
        Mistake(
            "you divide by the number of all positions: ignored ones do not count",
            {"count = len(rows)": "count = len(targets)"},
        ),
        Mistake(
            "you do not divide the gradient by the number of positions: the loss is a mean",
            {"counted[:, None] / count": "counted[:, None]"},
        ),
        Mistake(
            "you forget to subtract 1 at the target: the gradient is softmax minus one-hot",
            {"    d_logits[rows, targets[rows]] -= 1\n": ""},
        ),
        Mistake(
            "your gradient has the wrong sign: it is softmax minus one-hot",
            {"d_logits * counted[:, None]": "-d_logits * counted[:, None]"},
        ),
        Mistake("your ignored positions have a gradient: their rows must be 0", {" * counted[:, None]": ""}),
        Mistake(
            "you use the logarithm to base 2: use the natural logarithm",
            {"loss = -logp": "loss = -1 / np.log(2) * logp"},
        ),
        Mistake(
            "exp overflows for large logits: subtract each row's maximum first",
            {"logits - logits.max(-1, keepdims=True)": "logits"},
        ),
    ),
    claims=CLAIMS,
    sources=SOURCES,
)


def attention_backward(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, Array, Array]:
    """Return (d_q, d_k, d_v) of causal attention."""
    scale = 1 / np.sqrt(k.shape[-1])
    allowed = np.tri(len(q), dtype=bool)
    p = softmax(np.where(allowed, q @ k.T * scale, -np.inf))
    d_v = p.T @ d_out
    d_p = d_out @ v.T
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    return d_scores @ k, d_scores.T @ q, d_v


def _backward_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, K: int, U: int) -> Case:
        shapes = {"q": (T, K), "k": (T, K), "v": (T, U), "d_out": (T, U)}
        return Case(label, {name: rng.normal(size=shape) for name, shape in shapes.items()})

    return [made("5 positions of width 4", 5, 4, 4), made("values of another width", 6, 3, 2), made("square", 4, 4, 4)]


ATTENTION = Exercise(
    id="nano-attention-backward",
    title="nanoGPT, stage 3: the backward pass of attention",
    problem="""\
Write the backward pass of causal attention for one head. The forward pass is out = p v, where p = softmax(q kᵀ / √K)
over the keys up to the query's own position.

  q, k (T, K), v (T, U)     the inputs of the forward pass
  d_out (T, U)              the gradient of the loss with respect to out

For one row of softmax, d_score_s = p_s (d_p_s - Σ_r p_r d_p_r).

Return the gradients of the loss with respect to q, k and v.""",
    solve=attention_backward,
    cases=_backward_cases,
    returns=("d_q", "d_k", "d_v"),
    mistakes=(
        Mistake(
            "you leave out the scale 1/√K in the backward pass: the scores were scaled too",
            {"keepdims=True)) * scale": "keepdims=True))"},
        ),
        Mistake(
            "you leave out the sum in the gradient of softmax: subtract Σ p d_p in each row",
            {"(d_p - (p * d_p).sum(-1, keepdims=True))": "d_p"},
        ),
        Mistake("you do not apply the causal mask in the forward pass", {"np.tri(len(q), dtype=bool)": "True"}),
        Mistake("your d_v uses p, not its transpose: d_v = pᵀ d_out", {"p.T @ d_out": "p @ d_out"}),
        Mistake(
            "your d_k uses the gradient of the scores without transposing it: d_k = d_scoresᵀ q",
            {"d_scores.T @ q": "d_scores @ q"},
        ),
        Mistake(
            "you swapped d_q and d_k", {"return d_scores @ k, d_scores.T @ q": "return d_scores.T @ q, d_scores @ k"}
        ),
        Mistake(
            "you leave out the factor p in the gradient of softmax: d_score = p (d_p - Σ p d_p)",
            {"p * (d_p - (p * d_p)": "(d_p - (p * d_p)"},
        ),
        Mistake(
            "you sum over queries in the gradient of softmax: sum over the keys of each row",
            {"(p * d_p).sum(-1, keepdims=True)": "(p * d_p).sum(0, keepdims=True)"},
        ),
    ),
    claims=CLAIMS,
    sources=SOURCES,
)


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


def _norm_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, d: int, eps: float) -> Case:
        arrays = {"x": 2 * rng.normal(size=(T, d)) + 1, "gain": rng.normal(size=d)}
        return Case(label, {**arrays, "eps": eps, "d_y": rng.normal(size=(T, d))})

    return [made("5 rows of width 6", 5, 6, 1e-5), made("square", 4, 4, 1e-5), made("a large eps", 3, 5, 0.5)]


NORM = Exercise(
    id="nano-norm-backward",
    title="nanoGPT, stage 4: the backward pass of LayerNorm",
    problem="""\
Write the backward pass of y = gain · z + bias with z = (x - mean) / √(variance + eps), row by row.

  x (T, d), gain (d), eps      of the forward pass
  d_y (T, d)                   the gradient of the loss with respect to y

With d_z = gain · d_y the gradient of a row is d_x = (d_z - mean(d_z) - z · mean(d_z · z)) / √(variance + eps).

Return the gradients with respect to x (T, d), gain (d) and bias (d).""",
    solve=norm_backward,
    cases=_norm_cases,
    returns=("d_x", "d_gain", "d_bias"),
    mistakes=(
        Mistake(
            "you treat mean and variance as constants: both depend on x, which adds two terms",
            {"(d_z - d_z.mean(-1, keepdims=True) - z * (d_z * z).mean(-1, keepdims=True))": "d_z"},
        ),
        Mistake(
            "you treat the variance as a constant: subtract z · mean(d_z · z)",
            {" - z * (d_z * z).mean(-1, keepdims=True)": ""},
        ),
        Mistake("you treat the mean as a constant: subtract mean(d_z)", {" - d_z.mean(-1, keepdims=True)": ""}),
        Mistake("you forget the gain in d_x: d_z = gain · d_y", {"d_z = d_y * gain": "d_z = d_y"}),
        Mistake(
            "your d_gain uses x: it is Σ d_y · z, with the normalised input", {"(d_y * z).sum(0)": "(d_y * x).sum(0)"}
        ),
        Mistake(
            "you average the gradients of gain and bias over the positions: add them up",
            {"(d_y * z).sum(0)": "(d_y * z).mean(0)", "d_y.sum(0)": "d_y.mean(0)"},
        ),
        Mistake(
            "you do not divide d_x by √(variance + eps)",
            {"mean(-1, keepdims=True)) / scale": "mean(-1, keepdims=True))"},
        ),
        Mistake("you leave out eps", {" + eps": ""}),
    ),
    claims=CLAIMS,
    sources=SOURCES,
)
