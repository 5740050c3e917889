"""Exercises about counting: parameters of a block and of GPT-2, n-gram estimates."""

import numpy as np

from glassformer.theory.exercises.exercise import Case, Exercise, Mistake


def block_parameters(d: int, f: int) -> int:
    """Count the parameters of one block, including biases and norms."""
    attention = 4 * (d * d + d)
    feedforward = d * f + f + f * d + d
    norms = 2 * (d + d)
    return attention + feedforward + norms


BLOCK = Exercise(
    id="block-parameters",
    title="Parameters of a block",
    problem="""\
How many parameters does one Transformer block of width d with a feed-forward layer of width f have?

It has four d × d matrices (queries, keys, values, output), a d × f and an f × d matrix (feed-forward), a bias for each
of these six linear layers, and two LayerNorms, each with a gain and a bias of size d. Return an integer.""",
    solve=block_parameters,
    cases=lambda rng: [
        Case("d 512, f 2048", {"d": 512, "f": 2048}),
        Case("d 768, f 3072", {"d": 768, "f": 3072}),
        Case("d 64, f 100", {"d": 64, "f": 100}, "f is not always 4d: use the given f"),
        Case("d 1, f 1", {"d": 1, "f": 1}),
    ],
    returns=("count",),
    mistakes=(
        Mistake(
            "you leave out the biases of the six linear layers: 4d in attention, f + d in the feed-forward layer",
            {"(d * d + d)": "(d * d)", "d * f + f + f * d + d": "d * f + f * d"},
        ),
        Mistake("you leave out the two LayerNorms: they have 4d parameters", {" + norms": ""}),
        Mistake(
            "you count 2d for the norms: there are two, each with a gain and a bias, so 4d", {"2 * (d + d)": "2 * d"}
        ),
        Mistake("you leave out the output matrix of attention: there are four square matrices", {"4 * (": "3 * ("}),
        Mistake("you assume f = 4d: use the given f", {"d * f + f + f * d + d": "8 * d * d + 5 * d"}),
        Mistake(
            "you count one feed-forward matrix: there are two, d × f and f × d", {"d * f + f + f * d + d": "d * f + f"}
        ),
    ),
    claims=("block-param-count", "dense-vs-attention-params"),
    whole=True,
)


def gpt2_parameters(vocab: int, context: int, d: int, layers: int) -> int:
    """Count all parameters; a shared table counts once."""
    tokens = vocab * d
    positions = context * d
    block = 12 * d * d + 9 * d + 4 * d
    final = 2 * d
    return tokens + positions + layers * block + final


GPT2 = Exercise(
    id="gpt2-parameters",
    title="Parameters of GPT-2",
    problem="""\
How many parameters does GPT-2 have?

  vocab, context, d, layers     50257, 1024, 768, 12 for the small model

It has a table of `vocab` token embeddings, a table of `context` learned position embeddings, `layers` blocks of width d
with feed-forward width 4d (every linear layer with a bias, two LayerNorms per block), and a final LayerNorm. The output
layer reuses the token table (weight tying) and has no bias, so it adds nothing. Return an integer.""",
    solve=gpt2_parameters,
    cases=lambda rng: [
        Case("GPT-2 small", {"vocab": 50257, "context": 1024, "d": 768, "layers": 12}),
        Case("GPT-2 medium", {"vocab": 50257, "context": 1024, "d": 1024, "layers": 24}),
        Case("a tiny one", {"vocab": 11, "context": 5, "d": 2, "layers": 3}),
        Case("no block at all", {"vocab": 7, "context": 3, "d": 4, "layers": 0}),
    ],
    returns=("count",),
    mistakes=(
        Mistake(
            "you count the output layer separately: it is the token table, which is counted once",
            {"tokens = vocab * d": "tokens = 2 * vocab * d"},
        ),
        Mistake("you leave out the final LayerNorm, which has 2d parameters", {" + final": ""}),
        Mistake("you leave out the position table, which has context · d parameters", {" + positions": ""}),
        Mistake("you leave out the token table, which has vocab · d parameters", {"return tokens + ": "return "}),
        Mistake("you leave out the biases in the blocks", {"12 * d * d + 9 * d": "12 * d * d"}),
        Mistake("you leave out the LayerNorms in the blocks", {" + 4 * d": ""}),
        Mistake("you count one block: multiply by `layers`", {"layers * ": ""}),
    ),
    claims=("gpt2-small-param-count", "weight-tying-saving"),
    whole=True,
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


STEP = "after = [tokens[i + n] for i in range(len(tokens) - n) if tokens[i : i + n] == context]"
SKIP = """\
after, i = [], 0
    while i < len(tokens) - n:
        found = tokens[i : i + n] == context
        after += [tokens[i + n]] if found else []
        i += max(n, 1) if found else 1"""
NGRAM = Exercise(
    id="ngram",
    title="An n-gram estimate",
    problem="""\
Estimate from a corpus the probability of `word` after `context`: the number of times `context` is followed by `word`,
divided by the number of times `context` is followed by any token.

  tokens     the corpus, a list of integers
  context    a list of n-1 tokens, possibly empty
  word       one token

Return a float. Return 0.0 if `context` is never followed by any token.""",
    solve=ngram,
    cases=_ngram_cases,
    returns=("probability",),
    mistakes=(
        Mistake(
            "you count the occurrence at the very end of the corpus, which nothing follows: the denominator counts "
            "only occurrences that some token follows",
            {"range(len(tokens) - n)": "range(len(tokens) - n + 1)", "tokens[i + n] for": "[*tokens, None][i + n] for"},
        ),
        Mistake(
            "you smooth the counts: the maximum-likelihood estimate adds nothing",
            {
                "after.count(word) / len(after) if after else 0.0": (
                    "(after.count(word) + 1) / (len(after) + len(set(tokens)))"
                )
            },
        ),
        Mistake(
            "you divide by the number of n-grams in the corpus, which gives a joint probability: divide by the "
            "number of occurrences of the context",
            {"/ len(after)": "/ (len(tokens) - n)"},
        ),
        Mistake("you skip overlapping occurrences: test every position", {STEP: SKIP}),
        Mistake(
            "you stop one token too early: the last token of the corpus can be the word that follows",
            {"range(len(tokens) - n)": "range(len(tokens) - n - 1)"},
        ),
    ),
    claims=("ngram-final-token", "unigram-mle"),
)
