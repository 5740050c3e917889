"""Exercises about finding bugs: a generator to diagnose from its logits, and a broken generator to repair."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax


def _logits(tokens: list[int], w: dict[str, Array], first: int, causal: bool, lost: int = -1) -> Array:
    """Return the logits of a model of two layers. `lost` is a key that no later query finds."""
    T = len(tokens)
    x = w["embed"][tokens] + w["position"][first : first + T]
    allowed = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
    if lost >= 0:
        allowed[lost + 1 :, lost] = False
    for layer in range(2):
        q, k, v = x @ w["query"][layer], x @ w["key"][layer], x @ w["value"][layer]
        scores = q @ k.T / np.sqrt(k.shape[-1])
        x = x + np.tanh(softmax(np.where(allowed, scores, -np.inf)) @ v)
    return np.asarray(x @ w["embed"].T)


def _measurements(rng: np.random.Generator, fault: str) -> dict[str, Any]:
    """Measure a generator with a fault, as a student would: four runs over the same text."""
    T, V, D = 7, 9, 6
    shapes = {"embed": (V, D), "position": (T + 1, D), "query": (2, D, D), "key": (2, D, D), "value": (2, D, D)}
    w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    tokens = [int(t) for t in rng.integers(0, V, T)]
    other = [*tokens[:-1], (tokens[-1] + 1 + int(rng.integers(V - 1))) % V]
    causal, first = "M" not in fault, int("P" in fault)
    prefixes = [_logits(tokens[: n + 1], w, first, causal)[-1] for n in range(T)]
    cached = list(prefixes)
    if (
        "C" in fault or "M" in fault
    ):  # a stored key does not change when later tokens arrive, so without a mask it is stale
        cached = [_logits(tokens[: n + 1], w, first, True, n - 2 if "C" in fault else -1)[-1] for n in range(T)]

    def rounded(logits: Any) -> Array:
        """Add what different orders of summation add."""
        return np.asarray(logits) * (1 + 1e-13 * rng.normal(size=np.shape(logits)))

    return {
        "whole": _logits(tokens, w, 0, causal),
        "replaced": _logits(other, w, 0, causal),
        "prefixes": rounded(prefixes),
        "cached": rounded(cached),
    }


def triage(whole: Array, replaced: Array, prefixes: Array, cached: Array) -> int:
    """Return 0 (no fault), 1 (mask), 2 (positions) or 3 (cache)."""
    if np.abs(whole - replaced)[:-1].max() > 1e-9:
        return 1
    if np.abs(whole - prefixes).max() > 1e-9:
        return 2
    if np.abs(prefixes - cached).max() > 1e-9:
        return 3
    return 0


def _triage_cases(rng: np.random.Generator) -> list[Case]:
    labels = {"": "generator A", "M": "generator B", "P": "generator C", "C": "generator D", "PC": "generator E"}
    cases = {fault: Case(label, _measurements(rng, fault)) for fault, label in labels.items()}
    shifted = _measurements(rng, "P")  # a replaced token changes its own logits more than its neighbours
    return [*cases.values(), Case("generator F", shifted)]


TRIAGE = Exercise(
    id="triage",
    title="Find the bug: which part of a generator is broken?",
    problem="""\
A model has a good training loss and writes bad text. Six generators were measured, each on one text of T tokens; name
the fault of each from its logits (T, V).

  whole        one pass over the text, as in training
  replaced     the same pass after the last token of the text was replaced by another one
  prefixes     row t: a pass over the first t + 1 tokens, as in generation without a cache; its last logits
  cached       row t: the same, token by token with a key-value cache

Test for faults in this order and return the first that you find, because a later test may fail for an earlier reason:

  1   a missing causal mask: a token changes the logits of earlier positions
  2   wrong positions in generation: the logits of equal prefixes differ between training and generation
  3   a broken cache: the logits differ with and without a cache
  0   no fault

Logits that differ by less than 1e-9 are equal: the order of summation rounds differently.""",
    solve=triage,
    cases=_triage_cases,
    returns=("fault",),
    mistakes=(
        Mistake(
            "you compare the replaced position too: its own logits may change. A leak shows at earlier positions",
            {"np.abs(whole - replaced)[:-1]": "np.abs(whole - replaced)"},
        ),
        Mistake(
            "you require equal bits: rounding differs between the runs. Allow a difference of 1e-9", {"> 1e-9": "> 0"}
        ),
        Mistake(
            "you compare the cached logits with those of training: compare with generation without a cache",
            {
                "    if np.abs(whole - prefixes).max() > 1e-9:\n        return 2\n": "",
                "np.abs(prefixes - cached)": "np.abs(whole - cached)",
            },
        ),
        Mistake(
            "you test the cache first: without a mask, stored keys are stale too, and the cache is blamed for it",
            {
                "    if np.abs(whole - replaced)": "    if np.abs(prefixes - cached).max() > 1e-9:\n        return 3\n"
                "    if np.abs(whole - replaced)"
            },
        ),
        Mistake(
            "you do not test the cache", {"    if np.abs(prefixes - cached).max() > 1e-9:\n        return 3\n": ""}
        ),
        Mistake(
            "you name wrong positions where the mask is missing: test for the mask first, because without it the "
            "logits of a prefix and of the whole text differ as well",
            {
                "    if np.abs(whole - replaced)": "    if np.abs(whole - prefixes).max() > 1e-9:\n        return 2\n"
                "    if np.abs(whole - replaced)"
            },
        ),
    ),
    claims=("generation-bug-triage", "kv-cache-validity"),
    whole=True,
)


def generate(prompt: list[int], w: dict[str, Array], n: int) -> tuple[list[int], Array]:
    """Return (tokens, logits): n new tokens and their logits, (n, V)."""
    text, keys, values, chosen = list(prompt), [], [], []
    for t in range(len(prompt) + n - 1):
        x = w["embed"][text[t]] + w["position"][t]
        keys.append(x @ w["key"])
        values.append(x @ w["value"])
        scores = np.array(keys) @ (x @ w["query"]) / np.sqrt(len(x))
        p = np.exp(scores - scores.max())
        x = x + p @ np.array(values) / p.sum()
        if t >= len(prompt) - 1:
            chosen.append(x @ w["head"])
            text.append(int(np.argmax(chosen[-1])))
    return text[len(prompt) :], np.array(chosen)


def _generate_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, length: int, n: int, V: int, D: int) -> Case:
        shapes = {"embed": (V, D), "position": (length + n, D), "head": (D, V)}
        w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        w |= {name: rng.normal(size=(D, D)) / D**0.5 for name in ("query", "key", "value")}
        return Case(label, {"prompt": [int(t) for t in rng.integers(0, V, length)], "w": w, "n": n})

    return [
        made("a prompt of 4 tokens, 5 new ones", 4, 5, 9, 6),
        made("a prompt of one token", 1, 4, 7, 5),
        made("one new token", 6, 1, 8, 4),
    ]


POSITIONS = Mistake(
    "the positions of new tokens are wrong: the position of a token is its index in the whole text",
    {'w["position"][t]': 'w["position"][min(t, len(prompt) - 1)]'},
)
SCALE = Mistake("the scores are not scaled: divide them by √D", {" / np.sqrt(len(x))": ""})
ITSELF = Mistake(
    "a token does not attend to itself: its key and value belong to the cache before the scores are computed",
    {"        p = np.exp(scores - scores.max())\n": "        scores[-1] = scores[-1] if len(keys) == 1 else -np.inf\n"
     "        p = np.exp(scores - scores.max())\n"},
)  # fmt: skip
REPAIR = Exercise(
    id="repair-generator",
    title="Find the bug: repair a generator",
    problem="""\
The file to start from generates greedily with a key-value cache and a model of one layer with one head. It runs, and
what it writes is wrong: there are three bugs in it. Find and repair them.

  prompt                  a list of tokens
  w                       embed (V, D), position (N, D), query, key and value (D, D), applied from the right,
                          head (D, V)
  n                       the number of new tokens

Each token is embedded with its position in the whole text, attends to itself and all tokens before it with softmax of
the scores divided by √D, and adds the result to its embedding. The head gives the logits. The first new token follows
the last token of the prompt.

Return the list of n new tokens and the logits (n, V) from which they were chosen.""",
    solve=generate,
    cases=_generate_cases,
    returns=("tokens", "logits"),
    mistakes=(
        POSITIONS,
        SCALE,
        ITSELF,
        Mistake(
            "the weights do not sum to 1: divide by p.sum()",
            {"p @ np.array(values) / p.sum()": "p @ np.array(values)"},
        ),
        Mistake(
            "the residual connection is missing: add the output of attention to x",
            {"x = x + p @": "x = p @"},
        ),
        Mistake(
            'the values of the cache are the keys: append x @ w["value"]',
            {'values.append(x @ w["value"])': 'values.append(x @ w["key"])'},
        ),
        Mistake(
            "the positions are one too large: the first token has position 0",
            {'w["position"][t]': 'w["position"][t + 1]'},
        ),
        Mistake(
            "the least likely token is chosen: take the argmax",
            {"np.argmax": "np.argmin"},
        ),
    ),
    broken=(POSITIONS, SCALE, ITSELF),
    claims=("generation-bug-triage", "kv-cache-exact"),
)
