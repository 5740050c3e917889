"""Exercises about counting: parameters of a block and of GPT-2, n-gram estimates."""

from collections.abc import Sequence

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, exercise


def block_parameters(d: int, f: int) -> int:
    """Count the parameters of one block, including biases and norms."""
    attention = 4 * (d * d + d)
    feedforward = d * f + f + f * d + d
    norms = 2 * (d + d)
    return attention + feedforward + norms


BLOCK = exercise("block-parameters", solve=block_parameters)


def gpt2_parameters(vocab: int, context: int, d: int, layers: int) -> int:
    """Count all parameters; a shared table counts once."""
    tokens = vocab * d
    positions = context * d
    block = 12 * d * d + 9 * d + 4 * d
    final = 2 * d
    return tokens + positions + layers * block + final


GPT2 = exercise("gpt2-parameters", solve=gpt2_parameters)


def ngram(tokens: list[int], context: list[int], word: int) -> float:
    """Return the maximum-likelihood estimate of p(word | context)."""
    n = len(context)
    after = [tokens[i + n] for i in range(len(tokens) - n) if tokens[i : i + n] == context]
    return after.count(word) / len(after) if after else 0.0


def _ngram_case(
    rng: np.random.Generator, tokens: Sequence[int] = (), context: Sequence[int] = (), word: int = 0
) -> Arguments:
    if not tokens:
        tokens = [int(t) for t in rng.integers(0, 3, 40)]
        context, word = tokens[10:12], tokens[12]
    return {"tokens": list(tokens), "context": list(context), "word": word}


NGRAM = exercise("ngram", solve=ngram, draw=_ngram_case)
