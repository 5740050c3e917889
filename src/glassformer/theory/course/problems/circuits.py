"""Numbers for the problems about induction heads."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

from glassformer.theory.course.answers import Number
from glassformer.theory.course.problem import Draw, Drawn


def induction_output(draw: Draw) -> Drawn:
    while True:
        tokens = [draw.choice("ABC") for _ in range(draw.integer(7, 11))]
        last = tokens[-1]
        after = Counter(b for a, b in pairwise(tokens) if a == last)
        if len(after) > 1:
            break
    total = sum(after.values())
    asked = draw.choice(sorted(after))
    wrong = {"frequency": Fraction(tokens.count(asked), len(tokens)), "recent": 1, "none": 0}
    values = {"text": " ".join(tokens), "last": last, "asked": asked, "total": total, "count": after[asked]}
    return Drawn(Number(Fraction(after[asked], total), 1e-3), values, wrong)


def induction_target(draw: Draw) -> Drawn:
    junk, block = draw.integer(0, 9), draw.integer(4, 18)
    t = junk + block + draw.integer(0, block - 2)
    wrong = {"same": t - block, "previous": t - 1, "before": t - block - 1, "start": t - block + 1 - junk}
    if junk == 0:
        del wrong["start"]
    values = {"junk": junk, "block": block, "t": t, "end": junk + block - 1, "second": junk + block}
    return Drawn(Number(t - block + 1), values, wrong)
