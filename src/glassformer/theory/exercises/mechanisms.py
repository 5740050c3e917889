"""Exercises about mechanisms: induction heads, rank collapse, logit attribution, linear attention."""

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax


def induction_scores(patterns: Array, tokens: list[int]) -> Array:
    """Return the induction score of each head, (H,)."""
    total, count = np.zeros(len(patterns)), 0
    for t, token in enumerate(tokens):
        earlier = [s for s in range(t) if tokens[s] == token]
        if earlier:
            total += patterns[:, t, earlier[-1] + 1]
            count += 1
    return total / count


def _induction_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, H: int, before: int, block: int, copies: int, hint: str = "") -> Case:
        ids = [int(t) for t in rng.permutation(50)]
        tokens = ids[:before] + ids[before : before + block] * copies
        T = len(tokens)
        patterns = np.where(np.tri(T, dtype=bool), 2 * rng.normal(size=(H, T, T)), -np.inf)
        return Case(label, {"patterns": softmax(patterns), "tokens": tokens}, hint)

    return [
        made("a block of 5 and its copy, 3 heads", 3, 0, 5, 2),
        made("3 other tokens first", 2, 3, 4, 2),
        made("three copies", 4, 2, 4, 3, "a token with several earlier occurrences counts the most recent one"),
        made("one head", 1, 4, 6, 2),
    ]


HIT = "patterns[:, t, earlier[-1] + 1]"
INDUCTION = Exercise(
    id="induction-score",
    title="Detecting induction heads",
    problem="""\
An induction head continues a repeated text: at a token that occurred before, it attends to the position after that
earlier occurrence. Measure how much each head does this.

  patterns (H, T, T)     attention weights of H heads: patterns[h, t, s] is the weight from position t to position s
  tokens                 the T tokens of the text

For each position t whose token occurred before t, let s be its most recent earlier position. The score of a head is
the mean of its weights from t to s + 1 over all such t; other positions do not count. No token is followed by itself.

Return an array (H).""",
    solve=induction_scores,
    cases=_induction_cases,
    returns=("scores",),
    mistakes=(
        Mistake(
            "you measure attention to the earlier occurrence (a duplicate-token head): take the position after it",
            {HIT: "patterns[:, t, earlier[-1]]"},
        ),
        Mistake(
            "you take the first earlier occurrence: take the most recent one", {HIT: "patterns[:, t, earlier[0] + 1]"}
        ),
        Mistake(
            "you divide by the number of all positions: only those whose token occurred before count",
            {"return total / count": "return total / len(tokens)"},
        ),
        Mistake(
            "you read the pattern transposed: patterns[h, t, s] is the weight from query t to key s",
            {HIT: "patterns[:, earlier[-1] + 1, t]"},
        ),
        Mistake(
            "you measure attention to the previous position (a previous-token head): "
            "take the position after the earlier occurrence",
            {HIT: "patterns[:, t, t - 1]"},
        ),
        Mistake("you add up the weights: take their mean", {"return total / count": "return total"}),
        Mistake(
            "you take the position before the earlier occurrence: an induction head looks at what came after it",
            {HIT: "patterns[:, t, max(earlier[-1] - 1, 0)]"},
        ),
    ),
    claims=("induction-head-detection", "induction-head-circuit"),
    sources=("Topic 10 ex. 2.2",),
)


def collapse(x: Array, w_q: Array, w_k: Array, w_v: Array, skip: bool) -> tuple[Array, Array]:
    """Return (ratios, deviations), one of each per layer."""
    ratios, deviations = [], []
    for layer in range(len(w_q)):
        q, k, v = x @ w_q[layer], x @ w_k[layer], x @ w_v[layer]
        mixed = softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v
        x = x + mixed if skip else mixed
        sigma = np.linalg.svd(x, compute_uv=False)
        ratios.append(sigma[1] / sigma[0])
        deviations.append(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x))
    return np.array(ratios), np.array(deviations)


def _collapse_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, D: int, layers: int, skip: bool) -> Case:
        w_q, w_k, w_v = (rng.normal(size=(layers, D, D)) / D**0.5 for _ in range(3))
        if skip:  # small enough that the scores of late layers stay moderate
            w_q, w_k, w_v = 0.5 * w_q, 0.5 * w_k, 0.5 * w_v
        return Case(label, {"x": rng.normal(size=(T, D)), "w_q": w_q, "w_k": w_k, "w_v": w_v, "skip": skip})

    return [
        made("50 layers, 8 tokens, no skip", 8, 12, 50, False),
        made("10 layers with a skip", 8, 12, 10, True),
        made("3 layers, 6 tokens of width 6", 6, 6, 3, False),
    ]


COLLAPSE = Exercise(
    id="rank-collapse",
    title="Rank collapse over 50 layers",
    problem="""\
Attention averages tokens. Stack layers of it and watch how soon all tokens are equal.

  x (T, D)                     the input
  w_q, w_k, w_v (L, D, D)      the matrices of L layers, applied from the right
  skip                         True: a layer adds its output to its input. False: its output replaces the input

A layer computes softmax(q kᵀ / √D) v, without a mask. After each layer measure the state x with two numbers:

  ratio       the second largest singular value of x divided by the largest
  deviation   ‖x - 1 mᵀ‖ / ‖x‖, where m is the mean of the rows of x and ‖·‖ the Frobenius norm

Return two arrays (L). The ratio alone does not show that rows are equal: a product of random matrices spreads the
singular values too. The deviation does.""",
    solve=collapse,
    cases=_collapse_cases,
    returns=("ratios", "deviations"),
    mistakes=(
        Mistake(
            "you ignore `skip`: if it is True, the layer's output is added to its input",
            {"x + mixed if skip else mixed": "mixed"},
        ),
        Mistake(
            "you always add the input: without `skip` the output replaces it",
            {"x + mixed if skip else mixed": "x + mixed"},
        ),
        Mistake("you do not scale the scores: divide q kᵀ by √D", {" / np.sqrt(k.shape[-1])": ""}),
        Mistake(
            "your weights sum to 1 over queries, not over keys: softmax along axis -1",
            {"np.sqrt(k.shape[-1]))": "np.sqrt(k.shape[-1]), 0)"},
        ),
        Mistake(
            "you divide the largest singular value by the second largest: divide the other way round",
            {"sigma[1] / sigma[0]": "sigma[0] / sigma[1]"},
        ),
        Mistake(
            "you square the singular values (the eigenvalues of x xᵀ): take the singular values of x",
            {"sigma[1] / sigma[0]": "(sigma[1] / sigma[0]) ** 2"},
        ),
        Mistake(
            "you use the smallest singular value: the ratio is that of the second largest to the largest",
            {"sigma[1] / sigma[0]": "sigma[-1] / sigma[0]"},
        ),
        Mistake(
            "you subtract the mean of each row: m is the mean over the tokens, axis 0",
            {"x.mean(0)": "x.mean(1, keepdims=True)"},
        ),
        Mistake("you do not divide the deviation by ‖x‖", {" / np.linalg.norm(x))": ")"}),
        Mistake(
            "you measure before each layer: measure after it",
            {
                "        x = x + mixed if skip else mixed\n": "",
                "np.linalg.norm(x))\n": "np.linalg.norm(x))\n        x = x + mixed if skip else mixed\n",
            },
        ),
    ),
    claims=("rank-collapse-depth", "rank-collapse-rate"),
    sources=("Topic 10 ex. 2.3 + hint 2.3",),
)


def logit_attribution(terms: Array, gain: Array, head: Array, eps: float) -> Array:
    """Return the part of each logit that each term writes, (C, V)."""
    centred = terms - terms.mean(-1, keepdims=True)
    scale = np.sqrt((centred.sum(0) ** 2).mean() + eps)
    return centred / scale * gain @ head


def _attribution_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, C: int, D: int, V: int) -> Case:
        terms = rng.normal(size=(C, D)) + rng.normal(size=(C, 1))
        return Case(label, {"terms": terms, "gain": rng.normal(size=D), "head": rng.normal(size=(D, V)), "eps": 1e-2})

    return [made("5 terms of width 8", 5, 8, 11), made("9 terms", 9, 6, 4), made("the embedding alone", 1, 5, 7)]


ATTRIBUTION = Exercise(
    id="logit-attribution",
    title="Taking the residual stream apart",
    problem="""\
The residual stream of a pre-norm Transformer is a sum: the embedding plus what each sublayer added. So the logits can
be divided among these terms (direct logit attribution).

  terms (C, D)     the C terms of the last position; their sum is the residual stream after the last block
  gain (D)         of the final LayerNorm, which has no bias
  head (D, V)      logits are norm(stream) @ head
  eps              added to the variance in the norm

The final LayerNorm is not linear, but it is once its scale is held fixed: the scale √(variance + eps) is that of the
whole stream. Subtracting the mean is linear already. Return an array (C, V): its row c is what term c contributes to
the logits, and its sum over c is the logits of the model.""",
    solve=logit_attribution,
    cases=_attribution_cases,
    returns=("contributions",),
    mistakes=(
        Mistake(
            "you normalise each term on its own: every term is divided by the scale of the whole stream",
            {"(centred.sum(0) ** 2).mean()": "(centred**2).mean(-1, keepdims=True)"},
        ),
        Mistake("you leave out the final norm", {"centred / scale * gain @ head": "terms @ head"}),
        Mistake(
            "you do not subtract the mean of each term: LayerNorm centres the stream",
            {"return centred / scale": "return terms / scale"},
        ),
        Mistake("you leave out the gain of the final norm", {" * gain": ""}),
        Mistake(
            "you add up the variances of the terms: take the variance of their sum",
            {"(centred.sum(0) ** 2).mean()": "(centred**2).sum() / centred.shape[-1]"},
        ),
        Mistake("you leave out eps", {" + eps": ""}),
        Mistake(
            "you return accumulated logits (a logit lens): row c must contain the part of term c alone",
            {"return centred / scale * gain @ head": "return np.cumsum(centred / scale * gain @ head, 0)"},
        ),
        Mistake(
            "you divide by the variance: divide by its square root",
            {"np.sqrt((centred.sum(0) ** 2).mean() + eps)": "((centred.sum(0) ** 2).mean() + eps)"},
        ),
    ),
    claims=("residual-stream-sum", "prenorm-vs-postnorm"),
)


def gradient_step(x: Array, y: Array, w: Array, eta: float, query: Array) -> tuple[Array, Array]:
    """Return (prediction, weights) of one step of gradient descent."""
    weights = eta * (x @ query)
    values = y - x @ w
    return query @ w + weights @ values, weights


def _gradient_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, n: int, D: int, m: int, eta: float, zero: bool) -> Case:
        w = np.zeros((D, m)) if zero else rng.normal(size=(D, m))
        return Case(label, {"x": rng.normal(size=(n, D)), "y": rng.normal(size=(n, m)), "w": w, "eta": eta,
                            "query": rng.normal(size=D)})  # fmt: skip

    return [
        made("6 examples, a start that is not zero", 6, 3, 2, 0.1, False),
        made("a start at zero and step size 1", 5, 4, 3, 1.0, True),
        made("one example", 1, 3, 2, 0.5, False),
    ]


GRADIENT = Exercise(
    id="gradient-step",
    title="Linear attention as a gradient step",
    problem="""\
A linear model predicts query @ W. Take one step of gradient descent on L(W) = ½ ‖x W - y‖² (sum over all examples and
outputs) from W = w, with step size eta, and predict for the query with the new W. Write the prediction as attention
without softmax over the examples:

  prediction = query @ w + Σ_i weight_i · value_i

  x (n, D), y (n, m)     the examples: inputs are keys
  w (D, m)               the start
  eta                    the step size
  query (D)              the input to predict for

Return the prediction (m) and the attention weights (n), which contain eta. From w = 0 with eta = 1 this is exactly
linear attention with keys x and values y.""",
    solve=gradient_step,
    cases=_gradient_cases,
    returns=("prediction", "weights"),
    mistakes=(
        Mistake(
            "your step goes uphill: the value of an example is target minus prediction",
            {"values = y - x @ w": "values = x @ w - y"},
        ),
        Mistake(
            "you use the targets as values: from a start that is not zero, values are the residuals y - x @ w",
            {"values = y - x @ w": "values = y"},
        ),
        Mistake(
            "you leave out the prediction of the start: add query @ w",
            {"query @ w + weights @ values": "weights @ values"},
        ),
        Mistake(
            "you apply softmax to the weights: this attention is linear",
            {"eta * (x @ query)": "np.exp(eta * (x @ query)) / np.exp(eta * (x @ query)).sum()"},
        ),
        Mistake("you leave out the step size: the weights contain eta", {"eta * (x @ query)": "x @ query"}),
        Mistake(
            "you average over the examples: the loss is a sum over them",
            {"eta * (x @ query)": "eta * (x @ query) / len(x)"},
        ),
        Mistake(
            "your gradient is twice too large: the loss has the factor ½",
            {"eta * (x @ query)": "2 * eta * (x @ query)"},
        ),
        Mistake(
            "you scale by √D: this attention has no scale",
            {"eta * (x @ query)": "eta * (x @ query) / np.sqrt(len(query))"},
        ),
    ),
    claims=("linear-attention-gd", "softmax-attention-kernel-smoother"),
)
