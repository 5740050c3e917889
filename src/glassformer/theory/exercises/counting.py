"""Exercises about counting: parameters of a block and of GPT-2, n-gram estimates."""

import numpy as np

from glassformer.theory.exercises.exercise import Case, exercise


def block_parameters(d: int, f: int) -> int:
    """Count the parameters of one block, including biases and norms."""
    attention = 4 * (d * d + d)
    feedforward = d * f + f + f * d + d
    norms = 2 * (d + d)
    return attention + feedforward + norms


BLOCK = exercise(
    "block-parameters",
    solve=block_parameters,
    cases=lambda rng: [
        Case("d 512, f 2048", {"d": 512, "f": 2048}),
        Case("d 768, f 3072", {"d": 768, "f": 3072}),
        Case("d 64, f 100", {"d": 64, "f": 100}, "f is not always 4d: use the given f"),
        Case("d 1, f 1", {"d": 1, "f": 1}),
    ],
)


def gpt2_parameters(vocab: int, context: int, d: int, layers: int) -> int:
    """Count all parameters; a shared table counts once."""
    tokens = vocab * d
    positions = context * d
    block = 12 * d * d + 9 * d + 4 * d
    final = 2 * d
    return tokens + positions + layers * block + final


GPT2 = exercise(
    "gpt2-parameters",
    solve=gpt2_parameters,
    cases=lambda rng: [
        Case("GPT-2 small", {"vocab": 50257, "context": 1024, "d": 768, "layers": 12}),
        Case("GPT-2 medium", {"vocab": 50257, "context": 1024, "d": 1024, "layers": 24}),
        Case("a tiny one", {"vocab": 11, "context": 5, "d": 2, "layers": 3}),
        Case("no block at all", {"vocab": 7, "context": 3, "d": 4, "layers": 0}),
    ],
)


def ngram(tokens: list[int], context: list[int], word: int) -> float:
    """Return the maximum-likelihood estimate of p(word | context)."""
    n = len(context)
    after = [tokens[i + n] for i in range(len(tokens) - n) if tokens[i : i + n] == context]
    return after.count(word) / len(after) if after else 0.0


def _ngram_cases(rng: np.random.Generator) -> list[Case]:
    end = "the occurrence at the very end of the corpus is followed by nothing, so the denominator does not count it"
    text = [int(t) for t in rng.integers(0, 3, 40)]
    return [
        Case("a corpus that ends with the context", {"tokens": [1, 2, 1, 3, 1], "context": [1], "word": 2}, end),
        Case(
            "two words of context, also at the end",
            {"tokens": [5, 6, 7, 5, 6, 8, 5, 6], "context": [5, 6], "word": 7},
            end,
        ),
        Case("40 random tokens", {"tokens": text, "context": text[10:12], "word": text[12]}),
        Case(
            "overlapping occurrences",
            {"tokens": [4, 4, 4, 4, 9], "context": [4, 4], "word": 4},
            "occurrences may overlap: test every position",
        ),
        Case(
            "a context that never occurs",
            {"tokens": [1, 2, 3], "context": [9], "word": 1},
            "return 0.0 if the context is never followed by anything",
        ),
        Case(
            "a context at the very end only",
            {"tokens": [1, 2, 3], "context": [3], "word": 1},
            "return 0.0 if the context is never followed by anything",
        ),
        Case(
            "no context",
            {"tokens": [1, 2, 2, 3], "context": [], "word": 2},
            "with an empty context the estimate is the relative frequency of the word",
        ),
    ]


NGRAM = exercise("ngram", solve=ngram, cases=_ngram_cases)
