"""The exercise of training a nanoGPT as a whole: there is no one correct answer, so the loss is judged."""

from typing import Any, NamedTuple

import numpy as np

from glassformer.theory.exercises.backward import cross_entropy
from glassformer.theory.exercises.exercise import Array, Case, Mistake, exercise, softmax
from glassformer.theory.exercises.training import adamw, batch


def forward(tokens: Array, w: dict[str, Array]) -> tuple[Array, ...]:
    x = w["embed"][tokens] + w["position"][: tokens.shape[1]]
    q, k, v = x @ w["query"], x @ w["key"], x @ w["value"]
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(k.shape[-1])
    allowed = np.tri(tokens.shape[1], dtype=bool)
    y = x + softmax(np.where(allowed, scores, -np.inf)) @ v
    return x, q, k, v, y, y @ w["head"]


def attention_gradients(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, Array, Array]:
    """Stage 3 for a batch of sequences: every argument is (B, T, K)."""
    scale = 1 / np.sqrt(k.shape[-1])
    scores = q @ k.transpose(0, 2, 1) * scale
    p = softmax(np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf))
    d_p = d_out @ v.transpose(0, 2, 1)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    d_q, d_k = d_scores @ k, d_scores.transpose(0, 2, 1) @ q
    return d_q, d_k, p.transpose(0, 2, 1) @ d_out


def gradients(inputs: Array, targets: Array, w: dict[str, Array]) -> dict[str, Array]:
    x, q, k, v, y, logits = forward(inputs, w)
    flat = logits.reshape(-1, logits.shape[-1])
    _, d = cross_entropy(flat, targets.reshape(-1), -100)
    d = d.reshape(logits.shape)
    d_y = d @ w["head"].T
    g = {"head": np.einsum("btd,btv->dv", y, d)}
    d_q, d_k, d_v = attention_gradients(q, k, v, d_y)
    d_x = d_y.copy()
    for name, d_part in (("query", d_q), ("key", d_k), ("value", d_v)):
        g[name] = np.einsum("btd,bte->de", x, d_part)
        d_x = d_x + d_part @ w[name].T
    g["position"] = d_x.sum(0)
    g["embed"] = np.zeros_like(w["embed"])
    np.add.at(g["embed"], inputs, d_x)
    return g


def train(text: Array, vocab: int, prompts: Array) -> Array:
    """Train on the text. Return log-probabilities (P, vocab)."""
    rng = np.random.default_rng(0)
    T, D, steps = prompts.shape[1], 16, 300
    sizes = {"embed": (vocab, D), "position": (T, D), "head": (D, vocab)}
    sizes |= dict.fromkeys(("query", "key", "value"), (D, D))
    w = {name: 0.4 * rng.normal(size=size) for name, size in sizes.items()}
    m = {name: np.zeros(size) for name, size in sizes.items()}
    v = {name: np.zeros(size) for name, size in sizes.items()}
    for step in range(1, steps + 1):
        inputs, targets = batch(text, rng.integers(0, len(text) - T, 16), T)
        g = gradients(inputs, targets, w)
        lr = 0.02 * (1 - step / (steps + 1))
        for name in w:
            w[name], m[name], v[name] = adamw(w[name], g[name], m[name], v[name], step, lr, 0.9, 0.99, 1e-8, 0.0)
    logits = forward(prompts, w)[-1][:, -1]
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Source(NamedTuple):
    """The distribution behind a text, and the losses that mark how much of it was learned."""

    after: Array
    """(P, V) true probabilities of the token after each prompt."""
    entropy: float
    pairs: float
    """The loss of the best table of pairs."""
    single: float
    """The loss of the best table of single tokens."""


def _draw(rng: np.random.Generator, p: Array, n: int) -> Array:
    """Draw a text in which two tokens determine the distribution of the next."""
    sums, tokens = p.cumsum(-1), [0, 1]
    for u in rng.random(n - 2):
        tokens.append(min(int(np.searchsorted(sums[tokens[-2], tokens[-1]], u)), len(p) - 1))
    return np.array(tokens)


def _loss(p: Array, logp: Array) -> float:
    return float(-(p * logp).sum(-1).mean())


def _case(rng: np.random.Generator, V: int, T: int) -> Case:
    while True:
        earlier, last = 2.5 * rng.normal(size=(V, V)), 1.2 * rng.normal(size=(V, V))
        p = softmax(earlier[:, None] + last[None])
        text, prompts = _draw(rng, p, 6000), _draw(rng, p, 150 * T).reshape(150, T)
        after = p[prompts[:, -2], prompts[:, -1]]
        counts = np.full((V, V), 0.1)
        np.add.at(counts, (text[:-1], text[1:]), 1)
        pairs = _loss(after, np.log(counts / counts.sum(1, keepdims=True))[prompts[:, -1]])
        single = _loss(after, np.log(counts.sum(0) / counts.sum())[None])
        source = Source(after, _loss(after, np.log(after)), pairs, single)
        # a model of pairs, or of single tokens, must not look like one that repeats the last token
        last = prompts[:, -1]
        repeats = max((counts.argmax(1)[last] == last).mean(), np.bincount(last).max() / len(last))
        if single - pairs > 0.15 and pairs - source.entropy > 0.3 and repeats < 0.75:  # levels can be distinguished
            return Case(f"{V} tokens, prompts of {T}", {"text": text, "vocab": V, "prompts": prompts}, hidden=source)


SHARE = 0.6
"""The loss may be this much of the way from the entropy to the loss of the best table of pairs."""
SHAPE = "return one row of log-probabilities for each prompt, as wide as the vocabulary"
DIVERGED = "your log-probabilities are NaN or infinite: the training diverged. Lower the learning rate"
PROBABILITIES = "you return probabilities: return their natural logarithms"
LOGITS = "you return logits, because exp of a row does not sum to 1: subtract log Σ exp(logit) from each row"
COPIES = "your model repeats the last token of the prompt: shift the targets, so that each is the next token"
WORSE = "your model is worse than guessing: the step goes uphill, or the learning rate is too large"
UNTRAINED = "your model guesses: all tokens are almost equally likely. Do the gradients reach the weights?"
SINGLE = "your model knows how frequent tokens are and ignores the prompt: does the input reach the head?"
PAIRS = (
    "your model uses the last token of the prompt alone, like a table of pairs: attention does not find the token "
    "before it. Are there position embeddings, and is the output of attention added to the residual stream?"
)


def judge_training(case: Case, values: tuple[Any, ...]) -> str:
    """Describe why a trained model is not good enough; an empty string if it is."""
    source, logp = case.hidden, values[0]
    if logp.shape != source.after.shape:
        return SHAPE
    if not np.isfinite(logp).all():
        return DIVERGED
    if (logp >= 0).all() and np.allclose(logp.sum(-1), 1, atol=1e-3):
        return PROBABILITIES
    if logp.max() > 1e-3 or not np.allclose(np.exp(logp).sum(-1), 1, atol=1e-3):
        return LOGITS
    loss, best, guess = _loss(source.after, logp), source.entropy, np.log(logp.shape[1])
    limit = best + SHARE * (source.pairs - best)
    if loss <= limit:
        return ""
    if (logp.argmax(-1) == case.arguments["prompts"][:, -1]).mean() > 0.9:
        return COPIES
    if loss > guess + 0.5:
        return WORSE
    p, last = np.exp(logp), case.arguments["prompts"][:, -1]
    if p.std(0).mean() < 0.03:  # the same prediction for every prompt
        return UNTRAINED if np.abs(p - 1 / p.shape[1]).mean() < 0.02 else SINGLE
    if np.mean([p[last == token].std(0).mean() for token in np.unique(last)]) < 0.02:  # the same for equal last tokens
        return PAIRS
    asked = f"your loss is {loss:.3f}, and at most {limit:.3f} is asked for (the entropy is {best:.3f})"
    return f"{asked}: train longer, and check the gradients"


STEP = "        inputs, targets = batch(text, rng.integers(0, len(text) - T, 16), T)\n"
GRADIENTS = "        g = gradients(inputs, targets, w)\n"
LAST = "return logits - np.log(np.exp(logits).sum(-1, keepdims=True))"
TRAIN = exercise(
    "nano-train",
    solve=train,
    cases=lambda rng: [_case(rng, 7, 6)],
    accepts=judge_training,
    mistakes=(
        Mistake(SHAPE, {LAST: "return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[:1]"}),
        Mistake(
            DIVERGED,
            {LAST: "return logits * np.inf", "16, 300": "16, 1"},
        ),
        Mistake(PROBABILITIES, {LAST: "return softmax(logits)"}),
        Mistake(LOGITS, {LAST: "return logits"}),
        Mistake(COPIES, {STEP: STEP + "        targets = inputs\n"}),
        Mistake(WORSE, {"adamw(w[name], g[name],": "adamw(w[name], -g[name],"}),
        Mistake(UNTRAINED, {"lr = 0.02": "lr = 0.0", "0.4 * rng": "0.1 * rng"}),
        Mistake(SINGLE, {STEP: STEP + "        inputs = np.roll(inputs, 1, axis=0)\n"}),
        Mistake(PAIRS, {GRADIENTS: f'{GRADIENTS}        w["value"], g["value"] = 0 * w["value"], 0 * g["value"]\n'}),
    ),
)
