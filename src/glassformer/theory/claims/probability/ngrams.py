"""Tables of counts: how large they grow, which token to leave out, what need not be stored.

The tables of `training.data.ngram`, the baselines of every training run, are compared with counting in plain Python.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import sympy as sp

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.training.data.ngram import Table, count, ratio

Text = tuple[int, ...]


@cache
def strings() -> tuple[tuple[int, Text], ...]:
    """All texts of 3 to 7 letters over 2 and over 3 letters, each with its alphabet."""
    return tuple((V, text) for V in (2, 3) for n in range(3, 8) for text in itertools.product(range(V), repeat=n))


def grams(text: Sequence[int], length: int) -> Counter[Text]:
    return Counter(tuple(text[i : i + length]) for i in range(len(text) - length + 1))


def row_sums(text: Text, length: int, omit: bool) -> dict[Text, Fraction]:
    """sum_x c_L(h, x) / c_(L-1)(h) of every context h; `omit` leaves the final token out of c_(L-1)."""
    contexts = grams(text[:-1] if omit else text, length - 1)
    followed: Counter[Text] = Counter()
    for gram, n in grams(text, length).items():
        followed[gram[:-1]] += n
    return {h: Fraction(followed[h], n) for h, n in contexts.items()}


def decode(tables: list[Table], length: int, vocab_size: int) -> Counter[Text]:
    """The L-grams of the engine's tables as tuples, with their counts."""
    names: list[list[Text]] = [[()]]
    for table in tables[:length]:
        last = table.keys % vocab_size
        names.append([(*names[-1][p], int(w)) for p, w in zip(table.prefix, last, strict=True)])
    return Counter(dict(zip(names[length], (int(n) for n in tables[length - 1].counts), strict=True)))


# ---------------------------------------------------------------- autoregressive-table-growth


def de_bruijn(vocab_size: int, length: int) -> Text:
    """The shortest text that holds every L-gram once: V^L + L - 1 tokens, greedily preferring the largest letter."""
    text = [0] * length
    seen = {tuple(text)}
    while True:
        for letter in range(vocab_size - 1, -1, -1):
            gram = (*text[len(text) - length + 1 :], letter)
            if gram not in seen:
                seen.add(gram)
                text.append(letter)
                break
        else:
            return tuple(text)


@claim("autoregressive-table-growth")
def table_growth(lab: Lab) -> Iterator[Finding]:
    """Under `broken` a token depends on the one before it only: the table stops growing."""
    wrong, cases = 0, 0
    for V in (2, 3, 4):
        total = 0
        for n in range(1, 6):
            reach = min(n, 2) if lab.broken else n
            table = {(h, x) for h in itertools.product(range(V), repeat=reach - 1) for x in range(V)}
            free = {(h, x) for h, x in table if x}  # the probability of letter 0 is what the others leave
            total += len(free)
            wrong += len(table) != V**n or len(free) != V ** (n - 1) * (V - 1) or total != V**n - 1
            cases += 1
    yield lab.exhaustive("entries enumerated, V <= 4, n <= 5", wrong, cases)
    V, N, n = sp.symbols("V N n", integer=True, positive=True)
    step = V**n - V ** (n - 1)
    telescoped = sp.simplify(step - V ** (n - 1) * (V - 1)) == 0
    total = sp.simplify(sum((V**m - V ** (m - 1) for m in range(1, 8)), sp.Integer(0)) - (V**7 - 1)) == 0
    closed = sp.simplify((V ** (N + 1) - 1) - (V**N - 1) - V**N * (V - 1)) == 0
    yield lab.exact("sum telescopes to V^N - 1", telescoped and total and closed)
    yield _on_our_tables(lab)
    yield _round_trip(lab)
    pairs = 50257**2
    yield lab.exact("V = 50257, n = 2", pairs == 2_525_766_049, n=pairs)


def _on_our_tables(lab: Lab) -> Finding:
    wrong, cases, sizes = 0, 0, {}
    for V in (2, 3, 4):
        for n in range(1, 6):
            text = de_bruijn(V, n)
            table = count(np.array(text), V, n)[-1]
            expected = V ** min(n, 2) if lab.broken else V**n
            wrong += len(table.keys) != expected or len(text) != V**n + n - 1 or set(table.counts) != {1}
            sizes[f"V={V}, n={n}"] = len(table.keys)
            cases += 1
    return lab.exhaustive("our tables on de Bruijn texts", wrong, cases, entries=sizes)


def _round_trip(lab: Lab) -> Finding:
    """Joint table -> conditional tables -> joint table, in fractions: neither has more freedom than the other."""
    rng, wrong, cases = lab.rng(), 0, 0
    for V, N in ((2, 3), (2, 4), (3, 3)):
        weights = rng.integers(1, 20, V**N)
        words = list(itertools.product(range(V), repeat=N))
        joint = {w: Fraction(int(n), int(weights.sum())) for w, n in zip(words, weights, strict=True)}
        start: Counter[Text] = Counter()
        for word, p in joint.items():
            for n in range(N + 1):
                start[word[:n]] += p  # type: ignore[assignment]
        for word in words:
            back = Fraction(1)
            for n in range(1, N + 1):
                h = word[:n] if not lab.broken or n < 3 else word[n - 2 : n]
                shorter = h[:-1]
                back *= Fraction(start[h]) / Fraction(start[shorter]) if start[h] else 0
            wrong += back != joint[word]
            cases += 1
    return lab.exhaustive("conditionals rebuild the joint table", wrong, cases, seed=lab.seed)


@figure("autoregressive-table-growth", "Entries of a table for p(token n | all before it)", height=3.0)
def draw_growth(lab: Lab, fig: Figure) -> None:
    n = np.arange(1, 13)
    ax = fig.canvas.subplots()
    for V, colour in ((2, COLOURS[0]), (100, COLOURS[2]), (50257, COLOURS[1])):
        ax.plot(n, n * np.log10(V), "o-", color=colour, markersize=3)
        ax.annotate(f"V = {V:,}", (12.2, 12 * np.log10(V)), va="center", color=colour)
    ax.axhline(80, color=GREY, linewidth=0.8, linestyle=":")
    ax.text(1, 81, "atoms in the visible universe, about 10⁸⁰", fontsize=8, color=GREY, va="bottom")
    ax.set(xlabel="position n", ylabel="log₁₀ of the entries", xlim=(0.5, 14.2), ylim=(0, 92))
    ax.set_xticks([1, 2, 4, 6, 8, 10, 12])


# ---------------------------------------------------------------- ngram-final-token


@claim("ngram-final-token")
def final_token(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the final token stays in."""
    contexts = wrong = 0
    short = short_wrong = sizes_wrong = 0
    for _, text in strings():
        for length in (2, 3):
            sums = row_sums(text, length, omit=not lab.broken)
            contexts += len(sums)
            wrong += sum(s != 1 for s in sums.values())
            kept = row_sums(text, length, omit=False)
            all_contexts, last = grams(text, length - 1), text[len(text) - length + 1 :]
            missing = {h: (1 - s) * all_contexts[h] for h, s in kept.items() if s != 1}
            short += 1
            short_wrong += missing != {last: 1}
            omitted = text if lab.broken else text[:-1]
            sizes_wrong += grams(text, length).total() != grams(omitted, length - 1).total()
    yield lab.exhaustive("without the final token every row sums to 1", wrong, contexts, lengths="3..7", L=[2, 3])
    yield lab.exhaustive("with it, the last context is short by one count", short_wrong, short)
    yield lab.exhaustive("both tables have T - L + 1 entries", sizes_wrong, short)
    yield _ours(lab)
    yield _aba(lab)
    yield _several(lab)


def _ours(lab: Lab) -> Finding:
    """`training.data.ngram.ratio` on the same texts."""
    wrong = cases = 0
    for V, text in strings():
        tables = count(np.array(text), V, 3)
        for length in (2, 3):
            prefix = tables[length - 1].prefix
            n, total = ratio(tables, length)
            if lab.broken:
                total = tables[length - 2].counts[prefix]
            row: Counter[int] = Counter()
            for h, times in zip(prefix.tolist(), n.tolist(), strict=True):
                row[h] += times
            wrong += any(row[h] != t for h, t in zip(prefix.tolist(), total.tolist(), strict=True))
            cases += 1
    return lab.exhaustive("our n-gram tables do so", wrong, cases)


def _aba(lab: Lab) -> Finding:
    """A B A, L = 2: what counting all tokens gives."""
    text = (0, 1, 0)
    pairs, single = grams(text, 2), grams(text, 1)
    by_count = Fraction(pairs[0, 1], single[0,])
    share = {g: Fraction(n, pairs.total()) for g, n in pairs.items()}
    alone = {g: Fraction(n, single.total()) for g, n in single.items()}
    after_b, row_a = share[1, 0] / alone[1,], share[0, 1] / alone[0,]
    omitted = row_sums(text, 2, omit=not lab.broken)
    right = (by_count, after_b, row_a) == (Fraction(1, 2), Fraction(3, 2), Fraction(3, 4))
    return lab.exact(
        "A B A",
        right and set(omitted.values()) == {Fraction(1)},
        count_ratio_B_after_A=str(by_count),
        probability_ratio_A_after_B=str(after_b),
        row_A=str(row_a),
    )


def _several(lab: Lab) -> Finding:
    """Several texts: the last token of each is left out."""
    texts = [(V, t) for V, t in strings() if V == 2 and len(t) <= 4]
    wrong = cases = 0
    for (_, a), (_, b) in itertools.product(texts, repeat=2):
        ends = (a, b) if lab.broken else (a[:-1], b[:-1])
        contexts = grams(ends[0], 1) + grams(ends[1], 1)
        followed: Counter[Text] = Counter()
        for gram, n in (grams(a, 2) + grams(b, 2)).items():
            followed[gram[:1]] += n
        wrong += followed != contexts
        cases += 1
    return lab.exhaustive("several texts", wrong, cases)


@figure("ngram-final-token", "Bigrams of ABRACADABRA: what the probabilities after each letter sum to", height=2.8)
def draw_sums(lab: Lab, fig: Figure) -> None:
    text = "ABRACADABRA"
    letters = sorted(set(text))
    ids = tuple(letters.index(x) for x in text)
    kept, omitted = (row_sums(ids, 2, omit) for omit in (False, True))
    bars = np.arange(len(letters))
    ax = fig.canvas.subplots()
    for shift, sums, colour, label in (
        (-0.2, kept, COLOURS[1], "final token counted"),
        (0.2, omitted, COLOURS[0], "final token left out"),
    ):
        values = [sums[i,] for i in range(len(letters))]
        ax.bar(bars + shift, [float(v) for v in values], 0.38, color=colour, label=label)
        for at, value in zip(bars + shift, values, strict=True):
            ax.text(at, float(value) + 0.02, str(value), ha="center", fontsize=8)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xticks=bars, xticklabels=letters, xlabel="context", ylabel="row sum", ylim=(0, 1.18))
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1.0), ncols=2, borderaxespad=0.1)


# ---------------------------------------------------------------- ngram-storage


@claim("ngram-storage")
def storage(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the final token stays in, and two corpora are counted as one text."""
    V, L = sp.symbols("V L", positive=True)
    rest = sp.simplify(V ** (L - 1) * (V - 1) + (V ** (L - 1) - 1) - (V**L - 1))
    yield lab.exact("conditional + (L-1)-joint = L-joint", rest == 0)
    wrong = dense = unlike = cases = 0
    for vocabulary, text in strings():
        tables = count(np.array(text), vocabulary, 3)
        for length in (2, 3):
            ours = decode(tables, length, vocabulary)
            marginal: Counter[Text] = Counter()
            for gram, n in ours.items():
                marginal[gram[:-1]] += n
            wrong += marginal != grams(text if lab.broken else text[:-1], length - 1)
            dense += len(ours) > len(text) - length + 1
            unlike += ours != grams(text, length)
            cases += 1
    yield lab.exhaustive("the marginal of c_L is c_(L-1) without the final token", wrong, cases)
    yield lab.exhaustive("at most T - L + 1 entries are stored", dense, cases)
    yield lab.exhaustive("our tables equal plain counting", unlike, cases)
    yield _merging(lab)
    yield _averaging(lab)


def _merging(lab: Lab) -> Finding:
    """Counts of two corpora add; no L-gram crosses from one to the other."""
    texts = [t for n in range(2, 5) for t in itertools.product((0, 1), repeat=n)]
    wrong = cases = 0
    for a, b in itertools.product(texts, repeat=2):
        for length in (2, 3):
            inside = [text[i : i + length] for text in (a, b) for i in range(len(text) - length + 1)]
            merged = grams(a + b, length) if lab.broken else grams(a, length) + grams(b, length)
            wrong += merged != Counter(inside)
            cases += 1
    return lab.exhaustive("counts add over corpora", wrong, cases)


def _averaging(lab: Lab) -> Finding:
    """AB and AAAA: p(B|A) from merged counts, and the mean of the two conditionals."""
    corpora = [(0, 1), (0, 0, 0, 0)]
    pairs = [grams(text, 2) for text in corpora]
    both = grams(corpora[0] + corpora[1], 2) if lab.broken else pairs[0] + pairs[1]

    def after_a(counted: Counter[Text]) -> Fraction:
        return Fraction(counted[0, 1], counted[0, 0] + counted[0, 1])

    merged, averaged = after_a(both), sum(map(after_a, pairs)) / Fraction(2)
    return lab.exact(
        "averaging conditionals is not merging",
        (merged, averaged) == (Fraction(1, 4), Fraction(1, 2)),
        merged=str(merged),
        averaged=str(averaged),
    )
