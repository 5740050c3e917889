"""Orthogonal inputs to attention without projections: not a fixed point, and by how much it is missed."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import sympy
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.registry import load_all
from glassformer.theory.claims.rounding import half_units, max_difference
from glassformer.theory.claims.weights.layer import identity, normal, run

STATED: dict[str, str] = dict(load_all()["orthogonal-inputs-fixed-point"].data)
"""Numbers of the statement, as printed."""


def relative_error(n: int, squared_norm: float) -> float:
    """|y - x| / |x| for N orthogonal vectors of one squared norm C: sqrt(N(N-1)) / (e^C + N - 1)."""
    return math.sqrt(n * (n - 1)) / (math.exp(squared_norm) + n - 1)


@claim("orthogonal-inputs-fixed-point")
def orthogonal_inputs(lab: Lab) -> Iterator[Finding]:
    for n in (2, 3, 4):
        holds = _closed_forms(n, slanted=lab.broken)
        yield lab.exact(f"closed forms, N={n}", holds)
    yield _any_size(lab)
    yield _zero_set(lab)
    yield from _on_the_engine(lab)
    yield from _numbers(lab)


def _closed_forms(n: int, slanted: bool) -> bool:
    c = sympy.symbols(f"c0:{n}", positive=True)
    x = sympy.diag(*c)
    if slanted:
        x[1, 0] = c[1]
    raised = (x * x.T).applyfunc(sympy.exp)
    squares = [sum(v**2 for v in x.row(m)) for m in range(n)]
    holds = True
    for i in range(n):
        y = (raised.row(i) / sum(raised.row(i))) * x
        below = sympy.exp(squares[i]) + n - 1
        others = sum((x.row(m) for m in range(n) if m != i), sympy.zeros(1, n))
        gap = y - x.row(i) - (others - (n - 1) * x.row(i)) / below
        length = sum(squares[m] for m in range(n) if m != i) + (n - 1) ** 2 * squares[i]
        misfit = sum(v**2 for v in y - x.row(i)) - length / below**2
        holds &= all(sympy.simplify(v) == 0 for v in (*gap, misfit))
    return holds


def _any_size(lab: Lab) -> Finding:
    """With s the sum of the others, orthogonal to x: N enters as a number, the vectors through their products only."""
    n, raised, x, s, own, rest = sympy.symbols("N E x s C R", positive=True)
    across = sympy.Symbol("x.s") if lab.broken else sympy.Integer(0)
    below = raised + n - 1
    difference = (raised * x + s) / below - x
    formula = (s - (n - 1) * x) / below
    products = {(2, 0): own, (1, 1): across, (0, 2): rest}
    squared = sum(k * products[powers] for powers, k in sympy.Poly((s - (n - 1) * x) ** 2, x, s).terms())
    length = sympy.expand(squared - rest - (n - 1) ** 2 * own) == 0
    equal = (rest + (n - 1) ** 2 * own).subs(rest, (n - 1) * own) / own
    vanishes = sympy.limit(sympy.sqrt(n * (n - 1)) / below, raised, sympy.oo) == 0
    holds = sympy.simplify(difference - formula) == 0 and length and sympy.expand(equal - n * (n - 1)) == 0 and vanishes
    return lab.exact("closed forms, any N", bool(holds))


def _zero_set(lab: Lab) -> Finding:
    """|y_n - x_n|^2 has the numerator sum_m C_m + (N-1)^2 C_n over the others m: zero only where every C is."""
    holds = True
    for n in range(1, 9):
        c = sympy.symbols(f"C0:{n}", nonnegative=True)
        numerator = sympy.Poly(sum(c[1:], (n - 1) ** 2 * c[0]), *c)
        linear = numerator.total_degree() <= 1 and numerator.eval(dict.fromkeys(c, 0)) == 0
        coefficients = [numerator.coeff_monomial(v) for v in c]
        # each squared norm enters with a coefficient of at least 1, for one token with 0: any X is then a fixed point
        holds &= linear and (all(k >= 1 for k in coefficients) if n > 1 else coefficients == [0])
    return lab.exact("fixed points", holds, largest_n=8)


def _on_the_engine(lab: Lab) -> Iterator[Finding]:
    generator, worst, least = lab.torch_rng(), 0.0, math.inf
    for n in (2, 5, 10):
        for c in (0.1, 1.0, 10.0):
            for uneven in (False, True):
                frame = torch.linalg.qr(normal(generator, 12, 12)).Q[:n]
                squares = c * (
                    torch.rand(n, generator=generator, dtype=torch.float64) + 0.5 if uneven else torch.ones(n)
                )
                x = squares.double().sqrt()[:, None] * frame
                if lab.broken:
                    x = x + 0.5 * frame[:1]
                y = run(identity(12, scale=1.0), x)["out"]
                worst = max(worst, max_difference(y, _formula(x)))
                least = min(least, float((y - x).norm() / x.norm()))
    yield lab.numerical("engine against formula", worst, 1e-12, tokens=[2, 5, 10], squared_norms=[0.1, 1, 10])
    yield lab.numerical("engine, Y differs from X", least, None, low=1e-8)


def _formula(x: torch.Tensor) -> torch.Tensor:
    """x_n + (sum of the others - (N-1) x_n) / (e^{C_n} + N - 1)."""
    n = len(x)
    return x + (x.sum(0) - n * x) / (x.square().sum(-1, keepdim=True).exp() + n - 1)


def _numbers(lab: Lab) -> Iterator[Finding]:
    for name, value in computed().items():
        yield lab.numerical(name, half_units(value, STATED[name]), 1, value=value, stated=STATED[name])


def computed() -> dict[str, float]:
    """The numbers of the statement, by the engine."""

    def measure(n: int, c: float) -> tuple[float, float, float]:
        x = math.sqrt(c) * torch.eye(n, dtype=torch.float64)
        seen = run(identity(n, scale=1.0), x)
        error = float((seen["out"] - x)[0].norm() / x[0].norm())
        return float(seen["pattern"][0, 0, 0]), float(seen["pattern"][0, 0, 1]), error

    def first(rows: Any) -> list[float]:
        y: list[float] = run(identity(2, scale=1.0), torch.tensor(rows, dtype=torch.float64))["out"][0].tolist()
        return y

    one, ten, four = measure(10, 1.0), measure(10, 10.0), measure(4, 1.0)
    values = [*one, ten[0], ten[2], four[0], *first([[1, 0], [0, 1]]), *first([[3, 0], [0, 1e6]])]
    return dict(zip(STATED, values, strict=True))


@figure("orthogonal-inputs-fixed-point", "How far attention moves orthogonal inputs", height=3.3)
def draw_error(lab: Lab, fig: Figure) -> None:
    squares = np.linspace(0, 12, 200)
    measured = np.arange(0.5, 12.1, 1.0)
    ax = fig.canvas.subplots()
    for n, colour in zip((2, 10, 100), COLOURS, strict=False):
        ax.semilogy(squares, [relative_error(n, c) for c in squares], color=colour, label=f"N = {n}")
        found = [_engine_error(n, c) for c in measured]
        ax.plot(measured, found, "o", ms=3.5, color=colour)
    ax.axvline(1, color=GREY, ls=":", lw=1)
    ax.text(1.1, 2e-5, "unit vectors", color=GREY)
    ax.set(xlabel="squared norm of each input", ylabel="|Y - X| / |X|", xlim=(0, 12), ylim=(1e-5, 2))
    ax.legend(title="line: formula, dots: engine", loc="upper right")


def _engine_error(n: int, c: float) -> float:
    x = math.sqrt(c) * torch.eye(n, dtype=torch.float64)
    return float((run(identity(n, scale=1.0), x)["out"] - x).norm() / x.norm())
