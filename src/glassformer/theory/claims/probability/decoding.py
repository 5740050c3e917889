"""Greedy decoding against the best sequence, on tables of two letters and on our models that compute them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.generation import generate
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.model import DecoderLM, build
from glassformer.theory.claims.claim import Lab, claim, figure, impossible, possible, solve
from glassformer.theory.claims.small_models import one_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = tuple[tuple[Fraction, ...], ...]
"""p(y1, y2): rows y1, columns y2."""
Pair = tuple[int, int]

SMALLEST, SMALLEST_TIED = ((4, 0), (3, 2)), ((3, 0), (2, 2))
"""Over 9: the smallest denominator without any tie. Over 7: with a tie that does not matter, in the second step."""
PRINTED = (("0", "0.4"), ("0.1", "0.25"))
"""The table of Bishop 12.15 as printed, with 2 rows and 2 columns; its columns are labelled y1."""
NEVER = -700.0
"""A log-probability: e^-700 is 1e-304, which no score of a likely pair can feel."""


def table(rows: Sequence[Sequence[Any]]) -> Table:
    return tuple(tuple(Fraction(v) for v in row) for row in rows)


def transpose(p: Table) -> Table:
    return tuple(zip(*p, strict=True))


def greedy(p: Table) -> Pair:
    """argmax p(y1), then argmax p(y2 | y1); ties go to the lower letter."""
    sums = [sum(row) for row in p]
    first = sums.index(max(sums))
    return first, p[first].index(max(p[first]))


def best(p: Table) -> Pair:
    cells = [(y1, y2) for y1 in range(len(p)) for y2 in range(len(p[0]))]
    return max(cells, key=lambda at: p[at[0]][at[1]])  # max keeps the first of equal ones


def ties(p: Table) -> dict[str, bool]:
    """Where two choices are equal: in p(y1), in the second step after greedy's first letter, among the best pairs."""

    def tied(values: Sequence[Any]) -> bool:
        return list(values).count(max(values)) > 1

    first = greedy(p)[0]
    cells = [v for row in p for v in row]
    return {"first": tied([sum(row) for row in p]), "second": tied(p[first]), "best": tied(cells)}


def independent_of(p: Table) -> Table:
    """The table with the same p(y1) and p(y2) in which the letters are independent; totals other than 1 are kept."""
    total = Fraction(sum(map(sum, p)))
    return tuple(tuple(Fraction(sum(row) * sum(col)) / total for col in transpose(p)) for row in p)


def misses(p: Table) -> bool:
    """Whether greedy ends at a pair that is less likely than the best."""
    (a, b), (x, y) = greedy(p), best(p)
    return p[a][b] < p[x][y]


@claim("greedy-vs-best")
def greedy_vs_best(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the two letters are independent, p(y1, y2) = p(y1) p(y2), where greedy never fails."""
    yield from _enumerated(lab)
    yield from _printed(lab)
    yield from _bounds(lab)
    yield from _engine(lab)


def _tables(total: int, independent: bool) -> Iterator[Table]:
    """All tables of whole numbers with this sum, or the products of their margins."""
    for a, b, d in itertools.product(range(total + 1), repeat=3):
        if a + b + d > total:
            continue
        p = table(((a, b), (d, total - a - b - d)))
        if independent:
            p = independent_of(p)
        yield p


def _enumerated(lab: Lab) -> Iterator[Finding]:
    """All whole-number tables with total <= 11: the criterion, and the smallest failures."""
    wrong = cases = failures = 0
    strict: int | None = None
    loose: int | None = None
    for total in range(1, 12):
        for p in _tables(total, lab.broken):
            tied = ties(p)
            if tied["first"] or tied["best"]:
                continue
            a, b = best(p)
            fails = misses(p)
            wrong += fails != (sum(p[1 - a]) > sum(p[a]))
            wrong += fails and not (2 * p[a][b] < total and 2 * p[greedy(p)[0]][greedy(p)[1]] > p[a][b])
            cases, failures = cases + 1, failures + fails
            if fails and loose is None:
                loose = total
            if fails and strict is None and not tied["second"]:
                strict = total
    yield lab.exhaustive("all whole-number tables, total <= 11", wrong, cases, failures=failures)
    p, tied = table(SMALLEST), ties(table(SMALLEST_TIED))
    witness = misses(table(SMALLEST_TIED)) and tied == {"first": False, "second": True, "best": False}
    shown = witness and misses(p) and (greedy(p), best(p)) == ((1, 0), (0, 0)) and not any(ties(p).values())
    yield lab.exact(
        "smallest denominators 9 and 7",
        (strict, loose) == (9, 7) and shown,
        without_tie=strict,
        with_tie=loose,
        greedy="(B,A) 3/9",
        best="(A,A) 4/9",
    )


def repairs() -> dict[str, Table]:
    """The printed table with one entry raised so that the total is 1, with y1 on the columns (as labelled) or rows."""
    printed = table(PRINTED)
    missing = 1 - sum(map(sum, printed))
    out = {}
    for i, j in itertools.product((0, 1), repeat=2):
        changed = tuple(
            tuple(v + missing if (r, col) == (i, j) else v for col, v in enumerate(row))
            for r, row in enumerate(printed)
        )
        out[f"{float(printed[i][j])} -> {float(changed[i][j])}, y1 on columns"] = transpose(changed)
        out[f"{float(printed[i][j])} -> {float(changed[i][j])}, y1 on rows"] = changed
    return out


def _printed(lab: Lab) -> Iterator[Finding]:
    printed = transpose(table(PRINTED))
    total = sum(map(sum, printed))
    found = greedy(printed) == best(printed) == (1, 0)
    suggested = transpose(table((("0", "0.4"), ("0.1", "0.5"))))
    holds = total == Fraction(3, 4) and found and not misses(suggested) and sum(map(sum, suggested)) == 1
    yield lab.exact("the printed table is no counterexample", holds, total=str(total))
    failing = [name for name, p in repairs().items() if misses(p)]
    yield lab.exhaustive(
        "of the 8 single-entry repairs one works",
        int(failing != ["0.1 -> 0.35, y1 on rows"]),
        len(repairs()),
        works=failing,
    )
    last = table((("0.4", "0.09"), ("0.3", "0.21")))
    if lab.broken:
        last = independent_of(last)
    valid = misses(last) and sum(map(sum, last)) == 1 and not any(ties(last).values())
    yield lab.exact("the last table is one", valid)


def _bounds(lab: Lab) -> Iterator[Finding]:
    """z3 over all real tables in which (A,A) is best and greedy starts with B."""

    def failing(z3: Any, V: int) -> tuple[list[list[Any]], list[Any]]:
        p = [[z3.Real(f"p{i}{j}") for j in range(V)] for i in range(V)]
        flat = [v for row in p for v in row]
        conditions = [*(v >= 0 for v in flat), z3.Sum(flat) == 1, *(p[0][0] > v for v in flat[1:])]
        conditions += [z3.Sum(p[1]) > z3.Sum(row) for i, row in enumerate(p) if i != 1]
        if lab.broken:  # an independent pair has the same row twice, up to a factor
            conditions += [p[0][i] * p[1][j] == p[0][j] * p[1][i] for i in range(V) for j in range(i)]
        return p, conditions

    def says(z3: Any, V: int, answer: Any, condition: Any) -> bool:
        p, conditions = failing(z3, V)
        return bool(answer(z3, *conditions, *condition(p)))

    def at_most(share: Fraction) -> Any:
        """Greedy's row has nothing above this share of the best."""
        return lambda p: [v * share.denominator <= share.numerator * p[0][0] for v in p[1]]

    def proof(V: int, answer: Any, share: Fraction) -> Any:
        return lambda z3: says(z3, V, answer, at_most(share))

    for V, above in ((2, "0.501"), (3, "0.334")):
        yield solve(lab, f"V = {V}: greedy <= best/{V} is impossible", proof(V, impossible, Fraction(1, V)))
        yield solve(lab, f"V = {V}: greedy <= {above} best is possible", proof(V, possible, Fraction(above)))
    yield solve(lab, "best >= 1/2 never fails", lambda z3: says(z3, 2, impossible, lambda p: [2 * p[0][0] >= 1]))


def model_of(p: np.ndarray) -> DecoderLM:
    """One of our decoders with p(y1) after its start token V and p(y2 | y1) after y1: a bigram table in its head."""
    V = len(p)
    cfg = one_layer(
        c.DecoderConfig,
        vocab_size=V + 1,
        d_model=V + 1,
        attention=c.Attention(1, bias=False),
        norm=c.RMSNorm(eps=1e-30),
        head=c.Head(tied=False),
    )
    model = build(cfg, dtype=torch.float64)
    assert isinstance(model, DecoderLM)
    assert model.head is not None
    assert model.head.weight is not None
    steps = np.full((V + 1, V + 1), NEVER)  # row: the token before, column: the next one
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = p.sum(axis=1)
        steps[:V, :V] = np.where(p > 0, np.log(p) - np.log(sums)[:, None], NEVER)
        steps[V, :V] = np.log(sums)
    with torch.no_grad():
        model.blocks[0].attention.o.weight.zero_()  # type: ignore[union-attr,operator]
        model.embed.tokens.weight.copy_(torch.eye(V + 1))
        model.head.weight.copy_(torch.tensor(steps.T / math.sqrt(V + 1)))  # RMSNorm makes one-hot rows sqrt(V+1) long
    return model


def _engine(lab: Lab) -> Iterator[Finding]:
    """Greedy and beam search of `generate` on such models."""
    rng, wrong, missed, cases = lab.rng(), {"greedy": 0, "beam": 0}, 0, 0
    named = [np.array(SMALLEST) / 9, np.array([[0.4, 0.09], [0.3, 0.21]])]
    drawn = [rng.dirichlet(np.full(V * V, 0.5)).reshape(V, V) for V in (2, 3, 5) for _ in range(12)]
    for p in [*named, *drawn]:
        if lab.broken:
            p = p.sum(axis=1, keepdims=True) * p.sum(axis=0)
        V, exact = len(p), table(p.tolist())
        model = model_of(p)
        one = generate(model, [[V]], max_new_tokens=2).new[0]
        wide = generate(model, [[V]], max_new_tokens=2, beams=V).new[0]
        wrong["greedy"] += tuple(one) != greedy(exact)
        wrong["beam"] += tuple(wide) != best(exact)
        missed, cases = missed + misses(exact), cases + 1
    yield lab.exhaustive("our greedy decoding = greedy on the table", wrong["greedy"], cases)
    yield lab.exhaustive("our beams of width V = best on the table", wrong["beam"], cases)
    yield lab.numerical("tables on which greedy misses", float(missed), None, low=2.0, of=cases)


@figure("greedy-vs-best", "Greedy takes the more likely first letter and misses the best pair", height=3.0)
def draw(lab: Lab, fig: Figure) -> None:
    p = table(SMALLEST)
    ax = fig.canvas.subplots()
    ax.set(xlim=(-0.25, 2.9), ylim=(-0.6, 3.6))
    ax.axis("off")
    for y1, height in ((0, 2.5), (1, 0.5)):
        row = sum(p[y1])
        _edge(ax, (0, 1.5), (1, height), f"{row}/9", COLOURS[1] if y1 else COLOURS[0])
        for y2, end in ((0, height + 0.55), (1, height - 0.55)):
            colour = COLOURS[0] if (y1, y2) == best(p) else COLOURS[1] if (y1, y2) == greedy(p) else GREY
            _edge(ax, (1, height), (2, end), f"{p[y1][y2] / row}", colour)
            mark = {best(p): "   best", greedy(p): "   greedy"}.get((y1, y2), "")
            text = f"{'AB'[y1]}{'AB'[y2]}  {p[y1][y2]}/9{mark}"
            ax.text(2.12, end, text, va="center", color=colour)
        ax.text(1, height, "AB"[y1], ha="center", va="center", bbox={"boxstyle": "circle", "fc": "white"})
    ax.text(0, 1.5, "start", ha="center", va="center", bbox={"boxstyle": "round", "fc": "white"})


def _edge(ax: "Axes", start: tuple[float, float], end: tuple[float, float], label: str, colour: str) -> None:
    ax.plot([start[0], end[0]], [start[1], end[1]], color=colour, linewidth=1.8, zorder=0)
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    ax.text(*middle, label, ha="center", va="center", fontsize=8, bbox={"fc": "white", "ec": "none", "pad": 1})
