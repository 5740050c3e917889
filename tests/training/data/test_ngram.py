"""N-gram baselines against references that count with dictionaries, fractions and closed forms."""

import itertools
import math
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from glassformer.training.data.corpus import SHAKESPEARE, DataError
from glassformer.training.data.ngram import NO_SINGLES, NGram, baselines, count, ratio

SHARED = Path(os.environ.get("GLASSFORMER_DATA", "../shared/data")) / SHAKESPEARE


def grams(tokens, length):
    return [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]


def spelled(tables, length, V=3):
    """The L-grams of a table in its order, from keys and prefixes."""
    if length == 0:
        return [()]
    table, shorter = tables[length - 1], spelled(tables, length - 1, V)
    return [(*shorter[p], int(key - p * V)) for p, key in zip(table.prefix, table.keys, strict=True)]


# counts and their ratios


def all_strings():
    for V in (2, 3):
        for n in range(3, 8):
            yield from itertools.product(range(V), repeat=n)


def test_ratios_with_the_final_token_omitted_sum_to_one_for_every_context_of_every_short_text():
    n_contexts = 0
    for text in all_strings():
        tables = count(np.array(text), 3, 3)
        for length in (2, 3):
            names = spelled(tables, length)
            above, below = (a.tolist() for a in ratio(tables, length))
            assert dict(zip(names, above, strict=True)) == Counter(grams(text, length))
            omitted = Counter(grams(text[:-1], length - 1))
            sums = Counter()
            for name, c, b in zip(names, above, below, strict=True):
                assert b == omitted[name[:-1]]
                sums[name[:-1]] += Fraction(c, b)
            assert set(sums) == set(omitted)
            assert set(sums.values()) == {Fraction(1)}
            n_contexts += len(sums)
    assert n_contexts == 22_048  # claim ngram-final-token


def test_without_the_omission_the_last_context_is_short_by_one_count():
    n_texts = 0
    for text in all_strings():
        for length in (2, 3):
            after = Counter(name[:-1] for name in grams(text, length))
            everywhere = Counter(grams(text, length - 1))
            assert everywhere - after == Counter([text[len(text) - length + 1 :]])
            n_texts += 1
    assert n_texts == 7_030  # claim ngram-final-token


def test_the_example_of_the_claim():
    tables = count(np.array([0, 1, 0]), 2, 2)  # A B A
    assert spelled(tables, 2, V=2) == [(0, 1), (1, 0)]
    assert [a.tolist() for a in ratio(tables, 2)] == [[1, 1], [1, 1]]


@hypothesis.given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 5))
def test_tables_hold_every_gram_with_its_count_prefix_and_suffix(text, order):
    tables = count(np.array(text, np.uint16), 3, order)
    assert len(tables) == min(order, len(text))
    for length in range(1, len(tables) + 1):
        table, names, shorter = tables[length - 1], spelled(tables, length), spelled(tables, length - 1)
        assert dict(zip(names, table.counts.tolist(), strict=True)) == Counter(grams(text, length))
        assert [shorter[i] for i in table.prefix] == [name[:-1] for name in names]
        assert [shorter[i] for i in table.suffix] == [name[1:] for name in names]
        assert (np.diff(table.keys) > 0).all()


# Kneser-Ney


class Slow:
    """Interpolated Kneser-Ney (or plain absolute discounting) straight from the definition, in fractions."""

    def __init__(self, text, V, order, kneser_ney=True):
        self.V, self.order, self.levels = V, order, []
        for length in range(1, order + 1):
            a = Counter(grams(text, length))
            if kneser_ney and length < order:
                a = Counter(gram[1:] for gram in set(grams(text, length + 1)))
            n1, n2 = (sum(c == k for c in a.values()) for k in (1, 2))
            D = Fraction(n1, n1 + 2 * n2) if n1 else Fraction(NO_SINGLES)
            self.levels.append((a, D))

    def p(self, w, h):
        h = tuple(h)[max(0, len(h) - self.order + 1) :]
        a, D = self.levels[len(h)]
        shorter = self.p(w, h[1:]) if h else Fraction(1, self.V)
        after = {gram[-1]: c for gram, c in a.items() if gram[:-1] == h}
        if not after:
            return shorter
        total = sum(after.values())
        return max(after.get(w, 0) - D, Fraction(0)) / total + D * len(after) / total * shorter


def distribution(model, context):
    """The probabilities of all tokens after a context."""
    return np.array([model.probabilities(np.array([*context, w]))[-1] for w in range(model.vocab_size)])


@pytest.mark.parametrize("kneser_ney", [True, False])
@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=4, max_size=40),
    st.lists(st.integers(0, 3), min_size=2, max_size=8),
    st.integers(1, 4),
)
def test_probabilities_are_those_of_the_definition(kneser_ney, text, asked, order):
    fast, slow = NGram(count(np.array(text), 4, order), 4, kneser_ney), Slow(text, 4, order, kneser_ney)
    expected = [slow.p(w, asked[:i]) for i, w in enumerate(asked)]
    assert np.allclose(fast.probabilities(np.array(asked)), np.array(expected, float), rtol=1e-12, atol=0)
    for i in range(len(asked)):
        exact = [slow.p(w, asked[:i]) for w in range(4)]
        assert sum(exact) == 1
        assert np.allclose(distribution(fast, asked[:i]), np.array(exact, float), rtol=1e-12, atol=0)


def test_a_longer_text_agrees_with_the_definition_at_order_five():
    generator = np.random.default_rng(0)
    text = np.cumsum(generator.integers(0, 3, 700)) % 11
    asked = np.cumsum(generator.integers(0, 4, 60)) % 11
    fast, slow = NGram(count(text, 12, 5), 12), Slow(text.tolist(), 12, 5)
    expected = [float(slow.p(w, asked[:i].tolist())) for i, w in enumerate(asked.tolist())]
    assert np.allclose(fast.probabilities(asked), expected, rtol=1e-12, atol=0)
    assert fast.cross_entropy(asked) == pytest.approx(-np.log(expected[1:]).mean(), rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_every_context_has_a_distribution(order):
    generator = np.random.default_rng(1)
    text = generator.integers(0, 30, 2000)
    model = NGram(count(text, 37, order), 37)
    for context in [text[i : i + 4] for i in range(0, 100, 7)] + [[36, 36, 36, 36], [], [5, 36], text[-4:]]:
        p = distribution(model, context)
        assert p.min() > 0
        assert p.sum() == pytest.approx(1, abs=1e-12)


def test_a_large_vocabulary_does_not_overflow():
    V = 200_000  # V**5 has 88 bits
    text = np.random.default_rng(2).integers(V - 50, V, 5000)
    slow = Slow(text[:300].tolist(), V, 5)
    fast = NGram(count(text[:300], V, 5), V)
    asked = text[290:310]
    expected = [float(slow.p(w, asked[:i].tolist())) for i, w in enumerate(asked.tolist())]
    assert np.allclose(fast.probabilities(asked), expected, rtol=1e-12, atol=0)


def test_a_text_without_singles_still_gives_unseen_tokens_a_chance():
    assert np.isfinite(baselines(np.zeros(100, np.uint16), np.array([0, 1, 2]), 3)["5-gram"])


# known sources


def source(V, order, n, seed=0):
    """Text of a Markov source and its entropy rate in nats, both under the stationary distribution."""
    generator = np.random.default_rng(seed)
    rows = generator.dirichlet(np.full(V, 0.2), V**order)
    sums = rows.cumsum(1)
    state, text = 0, np.empty(n, np.int64)
    for i, u in enumerate(generator.random(n)):
        text[i] = min(np.searchsorted(sums[state], u), V - 1)
        state = (state * V + text[i]) % V**order
    move = np.zeros((V**order, V**order))
    for s in range(V**order):
        for w in range(V):
            move[s, (s * V + w) % V**order] += rows[s, w]
    stationary = np.linalg.matrix_power(move.T / move.T.sum(0), 4096)[:, 0]
    return text, float(-(stationary @ (rows * np.log(np.maximum(rows, 1e-300))).sum(1)))


@pytest.mark.parametrize(("order", "beaten_by"), [(0, "unigram"), (1, "bigram"), (2, "5-gram")])
def test_the_entropy_of_a_source_is_approached_by_the_first_model_that_can_know_it(order, beaten_by):
    text, entropy = source(6, order, 60_000)
    found = baselines(text[:50_000], text[50_000:], 6)
    assert abs(found[beaten_by] - entropy) < 0.02  # sampling of 10,000 tokens and 180 parameters
    for name in ("unigram", "bigram", "5-gram")[: ("unigram", "bigram", "5-gram").index(beaten_by)]:
        assert found[name] > entropy + 0.1


def test_unigram_is_the_cross_entropy_of_frequencies():
    text = np.random.default_rng(3).integers(0, 9, 20_000)
    frequencies = np.bincount(text) / len(text)
    assert baselines(text, text, 9)["unigram"] == pytest.approx(-np.log(frequencies[text[1:]]).mean(), abs=1e-4)


# use


def test_only_the_first_tokens_of_a_long_text_count():
    text = np.random.default_rng(4).integers(0, 9, 3000)
    assert baselines(text, text, 9, limit=500) == baselines(text[:500], text[:500], 9)


def test_another_order_has_its_name():
    text = np.random.default_rng(5).integers(0, 9, 300)
    assert list(baselines(text, text, 9, order=3)) == ["unigram", "bigram", "3-gram"]


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        ([], [1, 2], "training tokens are none"),
        ([1, 2], [], "0 tokens have no successor"),
        ([1, 2], [1], "1 tokens have no successor"),
        ([1, 9], [1, 2], "training tokens have the id 9, but vocab_size=9"),
        ([1, 2], [1, -1], "validation tokens have the id -1"),
    ],
)
def test_wrong_tokens_are_sentences(train, val, words):
    with pytest.raises(DataError, match=words):
        baselines(np.array(train, np.int64), np.array(val, np.int64), 9)


def test_texts_shorter_than_the_order_are_no_accident():
    assert math.isfinite(baselines(np.array([1, 2]), np.array([1, 2]), 9)["5-gram"])


@pytest.mark.skipif(not SHARED.exists(), reason="tinyshakespeare.txt is not here; set GLASSFORMER_DATA")
def test_shakespeare_has_the_recorded_baselines():
    _, text = np.unique(np.frombuffer(SHARED.read_bytes(), np.uint8), return_inverse=True)
    found = baselines(text[:1_003_854], text[1_003_854:], 65)
    # measured here, and equal to what the definition gives (below)
    assert found["unigram"] == pytest.approx(3.34730, abs=1e-4)
    assert found["bigram"] == pytest.approx(2.48706, abs=1e-4)
    assert found["5-gram"] == pytest.approx(1.57893, abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="tinyshakespeare.txt is not here; set GLASSFORMER_DATA")
def test_shakespeare_agrees_with_the_definition():
    """All of Shakespeare with dictionaries, in floats."""
    text = SHARED.read_text()
    train, val = text[:1_003_854], text[1_003_854:]
    levels = []
    for n in range(1, 6):
        a = Counter(train[i : i + n] for i in range(len(train) - n + 1))
        if n < 5:
            longer = {train[i : i + n + 1] for i in range(len(train) - n)}
            a = Counter(gram[1:] for gram in longer)
        n1, n2 = (sum(c == k for c in a.values()) for k in (1, 2))
        total, different = Counter(), Counter()
        for gram, c in a.items():
            total[gram[:-1]] += c
            different[gram[:-1]] += 1
        levels.append((a, total, different, n1 / (n1 + 2 * n2)))
    loss = 0.0
    for i in range(1, len(val)):
        p = 1 / 65
        for n, (a, total, different, D) in enumerate(levels[: i + 1]):
            h = val[i - n : i]
            if h in total:
                p = (max(a[h + val[i]] - D, 0) + D * different[h] * p) / total[h]
        loss -= math.log(p)
    assert loss / (len(val) - 1) == pytest.approx(1.57893, abs=1e-4)
