"""Exercises about whole models: a GPT with its logits, a tied head, an encoder from a decoder, weights of GPT-2."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax

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


FIRST = 'x = x + attend(norm(x, b["gain_1"], b["bias_1"]), b, n_heads)'
SECOND = 'x = x + feed(norm(x, b["gain_2"], b["bias_2"]), b)'
GPT = Exercise(
    id="gpt",
    title="A complete GPT and its logits",
    problem="""\
Write the forward pass of a decoder-only Transformer. `norm`, `attend` (causal, several heads) and `feed` are given.

  tokens               a list of T token ids
  weights["tokens"]    (V, D) token embeddings;  weights["positions"] (N, D) learned position embeddings, N >= T
  weights["blocks"]    a list of blocks, each a dict with gain_1, bias_1 (norm before attention), gain_2, bias_2 (norm
                       before the feed-forward layer) and the matrices that `attend` and `feed` use
  weights["gain"], weights["bias"]     the final norm;  weights["head"] (D, V) the output layer, without a bias

Embed the tokens, add the position embeddings, apply the pre-norm blocks one after the other, the final norm, and the
head.

Return the logits (T, V): one row for every position, each a prediction of the token that follows it.""",
    solve=gpt,
    cases=_gpt_cases,
    returns=("logits",),
    mistakes=(
        Mistake(
            'you leave out the position embeddings: add row t of weights["positions"] at position t',
            {' + weights["positions"][: len(tokens)]': ""},
        ),
        Mistake(
            'you use the token id as the position: add row t of weights["positions"] at position t',
            {
                'weights["positions"][: len(tokens)]': (
                    'weights["positions"][np.array(tokens) % len(weights["positions"])]'
                )
            },
        ),
        Mistake(
            "you multiply the token embeddings by √D, as the first Transformer does: GPT adds them as they are",
            {'weights["tokens"][tokens]': 'weights["tokens"][tokens] * weights["tokens"].shape[1] ** 0.5'},
        ),
        Mistake(
            "you leave out the final norm: a pre-norm model has one before the head",
            {'    x = norm(x, weights["gain"], weights["bias"])\n': ""},
        ),
        Mistake(
            "you return the last position alone: return the logits of all T positions",
            {'return x @ weights["head"]': 'return x[-1:] @ weights["head"]'},
        ),
        Mistake(
            "you return probabilities: return the logits, before softmax",
            {'return x @ weights["head"]': 'return softmax(x @ weights["head"])'},
        ),
        Mistake(
            "you apply only the last block: the blocks come one after the other",
            {'for b in weights["blocks"]:': 'for b in weights["blocks"][-1:]:'},
        ),
        Mistake(
            "you normalise after adding (post-norm): normalise the input of each sublayer",
            {
                FIRST: 'x = norm(x + attend(x, b, n_heads), b["gain_1"], b["bias_1"])',
                SECOND: 'x = norm(x + feed(x, b), b["gain_2"], b["bias_2"])',
            },
        ),
        Mistake(
            "you leave out the residual connections: add the output of each sublayer to x",
            {"x = x + attend": "x = attend", "x = x + feed": "x = feed"},
        ),
        Mistake(
            "both sublayers read the same input: the feed-forward layer reads the sum after attention",
            {FIRST: "y = x\n        " + FIRST, "feed(norm(x,": "feed(norm(y,"},
        ),
    ),
    claims=("gpt-logits-shape", "preln-block-shape"),
    sources=("Ch. 13 ex. 14",),
    given=("norm", "attend", "feed"),
)


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


TIED = Exercise(
    id="tied-head",
    title="Weight tying: logits, gradient, parameters saved",
    problem="""\
With weight tying the output layer uses the token table: the logit of token v is the dot product of the hidden state
with row v of the table. So the table is used twice, and gets a gradient from both uses.

  tokens               T token ids: row tokens[t] of the table was the embedding of position t
  hidden (T, D)        the normalised states in front of the head
  table (V, D)         the token table
  d_logits (T, V)      the gradient of the loss with respect to the logits
  d_x (T, D)           the gradient of the loss with respect to the embeddings of the T positions

Return the logits (T, V), the gradient of the loss with respect to the table (V, D), and the number of parameters that
tying saves compared with a separate head without a bias.""",
    solve=tied_head,
    cases=_tied_cases,
    returns=("logits", "d_table", "saved"),
    mistakes=(
        Mistake(
            "you leave out the gradient of the embedding: add d_x to the rows of the tokens",
            {"    np.add.at(d_table, tokens, d_x)\n": ""},
        ),
        Mistake(
            "you leave out the gradient of the head: add d_logits.T @ hidden",
            {"d_table = d_logits.T @ hidden": "d_table = np.zeros_like(table)"},
        ),
        Mistake(
            "d_table[tokens] += d_x adds only once for a token that occurs several times: use np.add.at",
            {"np.add.at(d_table, tokens, d_x)": "d_table[tokens] += d_x"},
        ),
        Mistake(
            "you overwrite the gradient of the head: add the gradient of the embedding to it",
            {
                "np.add.at(d_table, tokens, d_x)": (
                    "rows = np.zeros_like(table)\n    np.add.at(rows, tokens, d_x)\n    d_table[tokens] = rows[tokens]"
                )
            },
        ),
        Mistake("you count D · D parameters: a separate head has V · D", {"table.size": "table.shape[1] ** 2"}),
        Mistake(
            "you count the table twice: tying saves one of two tables, V · D parameters",
            {"table.size": "2 * table.size"},
        ),
        Mistake("you count one number per token: a row of the head has D of them", {"table.size": "len(table)"}),
        Mistake(
            "you divide the logits by √D: a head has no scale",
            {"hidden @ table.T": "hidden @ table.T / np.sqrt(table.shape[1])"},
        ),
    ),
    claims=("weight-tying-saving", "weight-tying-expressivity"),
    sources=("Ch. 13 ex. 15",),
)


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


ENCODER = Exercise(
    id="encoder-from-decoder",
    title="An encoder from a decoder",
    problem="""\
The same weights make an encoder or a decoder: only the mask differs. Return the attention weights (T, T) of one head.

  x (T, D)             the input
  w_qkv (D, 3D)        applied from the right: queries, keys and values side by side
  real (T)             True for tokens, False for padding at the end; at least the first is a token
  causal               True: a decoder, where a position attends to itself and earlier positions
                       False: an encoder, where a position attends to every position

No position attends to padding. Scores are divided by √D. Rows that belong to padding are computed like all others.""",
    solve=masked_attention,
    cases=_masked_cases,
    returns=("weights",),
    mistakes=(
        Mistake(
            "your encoder is causal: without `causal` every position sees later ones too", {"if causal:": "if True:"}
        ),
        Mistake(
            "your decoder sees later positions: apply the causal mask if `causal` is True", {"if causal:": "if False:"}
        ),
        Mistake("you use `causal` the wrong way round: True makes a decoder", {"if causal:": "if not causal:"}),
        Mistake(
            "your causal mask is transposed: a position attends to earlier ones",
            {"np.tri(len(x), dtype=bool)": "np.tri(len(x), dtype=bool).T"},
        ),
        Mistake(
            "you attend to padding: a key that is not real gets the weight 0",
            {"np.tile(real, (len(x), 1))": "np.ones((len(x), len(x)), bool)"},
        ),
        Mistake(
            "you mask the queries that are padding: mask the keys, that is columns of the scores",
            {"np.tile(real, (len(x), 1))": "np.tile(real[:, None], (1, len(x)))"},
        ),
        Mistake("you use `real` the wrong way round: True marks tokens", {"np.tile(real,": "np.tile(~real,"}),
        Mistake("you set masked scores to 0, and exp(0) is 1: set them to -inf", {"scores, -np.inf": "scores, 0.0"}),
        Mistake("you do not scale the scores: divide by √D", {" / np.sqrt(k.shape[-1])": ""}),
    ),
    claims=("encoder-from-decoder", "architecture-masks"),
    sources=("Ch. 13 ex. 18",),
)
