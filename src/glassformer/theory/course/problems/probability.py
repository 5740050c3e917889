"""Numbers for the problems about probabilities of language models."""

from fractions import Fraction
from math import log, log2
from typing import Any

from glassformer.theory.course.answers import Number
from glassformer.theory.course.problem import Draw, Drawn


def unigram_estimate(draw: Draw) -> Drawn:
    counts = [draw.integer(0, 9), *(draw.integer(1, 12) for _ in range(draw.integer(2, 3)))]
    draw.shuffle(counts)
    k, total, v = draw.randrange(len(counts)), sum(counts), len(counts)
    wrong = {"uniform": Fraction(1, v), "smoothed": Fraction(counts[k] + 1, total + v)}
    if counts[k] and total > counts[k]:
        wrong["others"] = Fraction(counts[k], total - counts[k])
    return Drawn(Number(Fraction(counts[k], total), 1e-3), {"counts": counts, "k": k + 1, "total": total}, wrong)


def table_growth(draw: Draw) -> Drawn:
    v, n = draw.integer(2, 9), draw.integer(3, 6)
    wrong = {"entries": v**n, "last": v ** (n - 1) * (v - 1), "linear": n * (v - 1)}
    return Drawn(Number(v**n - 1), {"v": v, "n": n}, wrong)


def final_token(draw: Draw) -> Drawn:
    text = ""
    while not text or text.count(text[-1]) < 2:
        text = "".join(draw.choice("ABC") for _ in range(draw.integer(7, 12)))
    count = text.count(text[-1])
    wrong = {"normalised": 1, "more": Fraction(count + 1, count), "share": Fraction(count, len(text))}
    values = {"text": " ".join(text), "last": text[-1], "count": count, "less": count - 1}
    return Drawn(Number(Fraction(count - 1, count), 1e-3), values, wrong)


def ngram_storage(draw: Draw) -> Drawn:
    v, length = draw.integer(3, 12), draw.integer(2, 4)
    joint, shorter = v**length - 1, v ** (length - 1)
    wrong = {"joint": joint, "entries": v**length, "both": v**length + shorter, "contexts": shorter}
    values = {"v": v, "length": length, "context": length - 1, "shorter": shorter, "joint": joint, "free": v - 1}
    return Drawn(Number(shorter * (v - 1)), values, wrong)


def recurrent_state(draw: Draw) -> Drawn:
    w, u, b, xs = draw.integer(1, 3), -1, draw.integer(-1, 2), draw.vector(4, 1, 9)

    def run(first: int = 0, clip: bool = True, recurrent: int = u) -> int:
        h = 0
        for x in xs[first:]:
            h = w * x + recurrent * h + b
            h = max(0, h) if clip else h
        return h

    wrong = {"last": run(3), "linear": run(clip=False), "short": run(1), "sum": run(recurrent=1)}
    return Drawn(Number(run()), {"w": w, "u": u, "b": b, "xs": xs}, wrong)


def greedy_pair(draw: Draw) -> Drawn:
    while True:
        table = [[draw.integer(0, 6) for _ in range(2)] for _ in range(2)]
        total, sums = sum(map(sum, table)), [sum(row) for row in table]
        best = max(max(row) for row in table)
        if sums[0] == sums[1] or table[0][0] == table[0][1] or table[1][0] == table[1][1] or not total:
            continue
        first = sums.index(max(sums))
        greedy = max(table[first])
        if greedy < best and [*table[0], *table[1]].count(best) == 1:
            break
    wrong = {"best": Fraction(best, total), "first": Fraction(max(sums), total), "second": Fraction(greedy, max(sums))}
    shown = {f"p{i}{j}": table[i][j] for i in range(2) for j in range(2)}
    values = {**shown, "total": total, "first": "AB"[first], "best": Fraction(best, total)}
    return Drawn(Number(Fraction(greedy, total), 1e-3), values, wrong)


def entropy_rate(draw: Draw) -> Drawn:
    a, b = (Fraction(n, 10) for n in draw.sample(range(1, 10), 2))

    def entropy(p: Any, base: Any = log) -> float:
        return float(-p * base(p) - (1 - p) * base(1 - p))

    share = (1 - b) / (2 - a - b)
    rate = float(share) * entropy(a) + float(1 - share) * entropy(b)
    wrong = {
        "unigram": entropy(share),
        "bits": rate * log2(2.718281828459045),
        "equal": (entropy(a) + entropy(b)) / 2,
        "zero": 0,
    }
    return Drawn(Number(rate, 4e-3), {"a": a, "b": b, "share": float(share)}, wrong)
