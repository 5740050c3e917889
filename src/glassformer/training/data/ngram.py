"""N-gram baselines: cross-entropy of the validation tokens under unigrams, bigrams and 5-grams of the training tokens.

All of them are ratios of counts. Let c_L(h w) be how often the L-gram of context h (L - 1 tokens) and token w occurs. A
context counts only where a token follows it, so c_{L-1}(h) is taken with the final token of the text omitted; then
c_L(h w) / c_{L-1}(h) sums to 1 over w for every context that was seen (claim ngram-final-token). Absolute discounting
(Ney et al. 1994) takes D off every count and gives it to the shorter context,

    p_L(w | h) = max(a(h w) - D, 0) / a(h) + D n(h) / a(h) * p_{L-1}(w | h without its first token),

with a(h) = sum_w a(h w), n(h) the number of different w seen after h, p_0 = 1 / V, and D = n1 / (n1 + 2 n2) per length,
n1 and n2 the numbers of L-grams with a = 1 and a = 2. Unigram and bigram take a = c. The 5-gram is Kneser and Ney's
(1995; interpolated, Chen and Goodman 1999): the longest L takes a = c, shorter ones count the different tokens before,
a(h w) = |{v : c(v h w) > 0}|. An unseen context leaves it to the shorter one.
"""

from dataclasses import dataclass

import numpy as np

from glassformer.training.data.corpus import DataError

LIMIT = 10_000_000
"""Tokens of each split that are used, the first ones: about 1 GB of memory and 25 seconds."""
NO_SINGLES = 0.5
"""D where n1 = 0: with D = 0 a token never seen would have probability 0."""


@dataclass(frozen=True)
class Table:
    """The different L-grams of a text, sorted. The number of an L-gram is its index here."""

    keys: np.ndarray
    """Number of the first L - 1 tokens, times V, plus the last token; sorted."""
    counts: np.ndarray
    """How often it occurs."""
    prefix: np.ndarray
    """Number of the first L - 1 tokens in the table of L - 1."""
    suffix: np.ndarray
    """Number of the last L - 1 tokens in the table of L - 1."""

    def find(self, prefix: np.ndarray, last: np.ndarray, vocab_size: int) -> np.ndarray:
        """Numbers of the L-grams (prefix, last); -1 for those not here and where the prefix is -1."""
        keys = prefix * vocab_size + last
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((prefix >= 0) & (self.keys[at] == keys), at, -1)


def count(tokens: np.ndarray, vocab_size: int, order: int) -> list[Table]:
    """Tables of the 1-grams to `order`-grams of a text; fewer when it is shorter than that."""
    tokens = _checked(tokens, vocab_size, "training")
    tables: list[Table] = []
    here = np.zeros(len(tokens) + 1, np.int64)  # number of the (L-1)-gram at each position
    for length in range(1, min(order, len(tokens)) + 1):
        n = len(tokens) - length + 1
        keys, first, inverse, counts = np.unique(
            here[:n] * vocab_size + tokens[length - 1 :], return_index=True, return_inverse=True, return_counts=True
        )
        tables.append(Table(keys, counts, here[first], here[first + 1]))
        here = inverse
    return tables


def ratio(tables: list[Table], length: int) -> tuple[np.ndarray, np.ndarray]:
    """c_L(h w) and c_{L-1}(h) of every L-gram, whose ratio is p(w | h); the latter without the text's final token.

    c_{L-1} without the final token is what c_L sums to over the last token, so it need not be counted again.
    """
    table = tables[length - 1]
    return table.counts, np.bincount(table.prefix, table.counts).astype(np.int64)[table.prefix]


@dataclass(frozen=True)
class Level:
    """One length L of a model, ready to be looked up."""

    table: Table
    a: np.ndarray
    context: np.ndarray
    """a(h) by the number of h; 0 for contexts that nothing follows."""
    followers: np.ndarray
    """n(h) by the number of h."""
    discount: float

    def interpolate(self, history: np.ndarray, found: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """p_L from p_{L-1} (`shorter`), for contexts and L-grams by number, -1 where never seen."""
        total = np.where(history >= 0, self.context[history], 0)
        a = np.where(found >= 0, self.a[found], 0)
        given = np.maximum(a - self.discount, 0) + self.discount * self.followers[history] * shorter
        return np.where(total > 0, given / np.maximum(total, 1), shorter)


class NGram:
    """p(w | the last `order` - 1 tokens), discounted and interpolated; see the module for the formula."""

    def __init__(self, tables: list[Table], vocab_size: int, kneser_ney: bool = True) -> None:
        self.vocab_size, self.order = vocab_size, len(tables)
        self.levels: list[Level] = []
        for i, table in enumerate(tables):
            longest = i == len(tables) - 1
            if longest or not kneser_ney:
                a = table.counts
            else:
                a = np.bincount(tables[i + 1].suffix, minlength=len(table.keys))
            n_contexts = len(tables[i - 1].keys) if i else 1
            context = np.bincount(table.prefix, a, n_contexts)
            followers = np.bincount(table.prefix[a > 0], minlength=n_contexts)
            self.levels.append(Level(table, a, context, followers, _discount(a)))

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Return the probability of each token given the tokens before it."""
        tokens = _checked(tokens, self.vocab_size, "validation")
        p = np.full(len(tokens), 1 / self.vocab_size)
        here = np.zeros(len(tokens) + 1, np.int64)  # number of the (L-1)-gram at each position, -1 if never seen
        for i, level in enumerate(self.levels[: len(tokens)]):
            history = here[: len(tokens) - i]
            here = level.table.find(history, tokens[i:], self.vocab_size)
            p[i:] = level.interpolate(history, here, p[i:])
        return p

    def cross_entropy(self, tokens: np.ndarray) -> float:
        """Return nats per token over all tokens but the first: the targets of a model that reads `tokens`."""
        if len(tokens) < 2:
            raise DataError(f"{len(tokens)} tokens have no successor to predict: a text needs 2 or more.")
        return float(-np.log(self.probabilities(tokens)[1:]).mean())


def _discount(a: np.ndarray) -> float:
    n1, n2 = int((a == 1).sum()), int((a == 2).sum())
    return n1 / (n1 + 2 * n2) if n1 else NO_SINGLES


def _checked(tokens: np.ndarray, vocab_size: int, name: str) -> np.ndarray:
    tokens = np.asarray(tokens).astype(np.int64)
    if not tokens.size:
        raise DataError(f"the {name} tokens are none: n-grams need a text.")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        worst = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
        raise DataError(f"the {name} tokens have the id {worst}, but vocab_size={vocab_size}: use ids below it.")
    return tokens


def baselines(
    train: np.ndarray, val: np.ndarray, vocab_size: int, order: int = 5, limit: int = LIMIT
) -> dict[str, float]:
    """Cross-entropy of the validation tokens in nats per token: `unigram`, `bigram` and `5-gram` (Kneser-Ney).

    All three predict the same tokens, all but the first. Of longer splits the first `limit` tokens are used.
    """
    tables = count(train[:limit], vocab_size, order)
    models = {
        "unigram": NGram(tables[:1], vocab_size, kneser_ney=False),
        "bigram": NGram(tables[:2], vocab_size, kneser_ney=False),
        f"{order}-gram": NGram(tables, vocab_size),
    }
    return {name: model.cross_entropy(val[:limit]) for name, model in models.items()}
