"""Attention as regression: linear attention is one step of gradient descent, softmax attention a kernel smoother."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import sympy as sp
import torch
from torch import Tensor

from glassformer.finding import Finding
from glassformer.lens.figure import GREY, Figure
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.theory.attend import NoSoftmax, attend
from glassformer.theory.claims.weights.layer import layer
from glassformer.theory.claims.weights.rational import rational


@claim("linear-attention-gd")
def linear_attention_gd(lab: Lab) -> Iterator[Finding]:
    yield lab.exact("one step from zero against attention", _one_step_symbolic(started_at_zero=not lab.broken))
    yield lab.exact("one step from any start", _general_start_symbolic())
    yield lab.exact("loss divided by n: eta = n", _mean_loss_symbolic())
    wrong, cases = _fractions_wrong(lab)
    yield lab.exact("whole-number data in exact fractions", wrong == 0, cases=cases, wrong=wrong)
    losses = [Fraction(1, 2) * (2 * w - 1) ** 2 for w in (0, 2)]  # X = [2], Y = [1]: W goes from 0 to eta X^T Y = 2
    yield lab.exact(
        "eta = 1 may raise the loss",
        losses == [Fraction(1, 2), Fraction(9, 2)],
        before=float(losses[0]),
        after=float(losses[1]),
    )
    error, size = _engine_against_autograd(lab)
    yield lab.numerical("the engine's layer predicts what gradient descent does", error / size, 1e-12)


def _symbols(n: int = 3, d: int = 2, m: int = 2) -> tuple[Any, ...]:
    shapes = {"X": (n, d), "Y": (n, m), "W": (d, m), "x": (d, 1)}
    return tuple(
        sp.Matrix(*shape, lambda i, j, name=name: sp.Symbol(f"{name}{i}{j}")) for name, shape in shapes.items()
    )


def _step(X: Any, Y: Any, start: Any, eta: Any, divide: int = 1) -> Any:
    """W after one step on L = |XW - Y|²/2 (over `divide`), its gradient taken by differentiating L."""
    W = sp.Matrix(*start.shape, lambda i, j: sp.Symbol(f"w{i}{j}"))
    loss = sum(entry**2 for entry in X * W - Y) / 2 / divide
    gradient = W.applyfunc(lambda w: sp.diff(loss, w))
    return start - eta * gradient.subs(dict(zip(W, start, strict=True)), simultaneous=True)


def _one_step_symbolic(started_at_zero: bool) -> bool:
    X, Y, W, x = _symbols()
    eta = sp.Symbol("eta")
    prediction = x.T * _step(X, Y, sp.zeros(*W.shape) if started_at_zero else W, eta)
    attention = (x.T * X.T) * Y
    gap = (prediction - attention - (eta - 1) * attention).applyfunc(sp.expand)
    return gap == sp.zeros(*gap.shape)


def _general_start_symbolic() -> bool:
    X, Y, W, x = _symbols()
    eta = sp.Symbol("eta")
    attention = x.T * W + eta * (x.T * X.T) * (Y - X * W)
    gap = (x.T * _step(X, Y, W, eta) - attention).applyfunc(sp.expand)
    # the same with letters that do not commute stands for matrices of any size
    row, keys, transposed, values, start = sp.symbols("x X Xt Y W", commutative=False)
    any_size = row * (start - eta * transposed * (keys * start - values))
    any_size -= row * start + eta * row * transposed * (values - keys * start)
    return gap == sp.zeros(*gap.shape) and sp.expand(any_size) == 0


def _mean_loss_symbolic() -> bool:
    X, Y, W, x = _symbols()
    n = X.rows
    gap = (x.T * _step(X, Y, sp.zeros(*W.shape), n, divide=n) - x.T * X.T * Y).applyfunc(sp.expand)
    return gap == sp.zeros(*gap.shape)


def _fractions_wrong(lab: Lab) -> tuple[int, int]:
    """One step in exact fractions against attention's sum over the data, on 100 random whole-number sets."""
    rng, wrong, cases = lab.rng(), 0, 100
    for _ in range(cases):
        n, d, m = (int(size) for size in rng.integers(1, 6, 3))
        X, Y, x, start = (rational(rng.integers(-5, 6, shape)) for shape in ((n, d), (n, m), (1, d), (d, m)))
        W = start if lab.broken else 0 * start
        stepped = W - X.T @ (X @ W - Y)
        attention = sum((x[0] @ key) * value for key, value in zip(X, Y, strict=True))
        wrong += bool((x[0] @ stepped != attention).any())
    return wrong, cases


def _engine_against_autograd(lab: Lab) -> tuple[float, float]:
    """The engine's layer on tokens (x_i, y_i) with selecting projections, against a step by torch's gradient."""
    n, d, m = 20, 5, 3
    rng = lab.torch_rng()
    X, Y, x = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((n, d), (n, m), (1, d)))
    whole = torch.eye(d + m, dtype=torch.float64)
    attention = layer(whole[:, :d], whole[:, :d], whole[:, d:], whole[d:], scale=1.0)
    tokens = torch.cat([torch.cat([X, Y], 1), torch.cat([x, torch.zeros(1, m, dtype=torch.float64)], 1)])
    with torch.no_grad():
        predicted = attention(tokens[None], tap=NoSoftmax())[0, -1, d:]
    start = torch.randn(d, m, generator=rng, dtype=torch.float64) if lab.broken else torch.zeros(d, m).double()
    W = start.requires_grad_()
    (0.5 * (X @ W - Y).square().sum()).backward()
    assert W.grad is not None
    stepped = (x @ (W - W.grad)).detach()[0]
    return max_difference(predicted, stepped), float(stepped.abs().max())


@figure("linear-attention-gd", "One step of gradient descent from zero, and linear attention")
def draw_gd(lab: Lab, fig: Figure) -> None:
    rng = lab.torch_rng(5)
    X, Y, x = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((12, 3), (12, 1), (1, 3)))
    X = 0.5 * X
    value = float(attend(x, X, Y, linear=True))
    least = float(x @ torch.linalg.lstsq(X, Y).solution)
    gradient = X.T @ Y  # up to its sign; along it the loss is a parabola, back at its start after 2|g|²/|Xg|²
    top = float(2 * gradient.square().sum() / (X @ gradient).square().sum())
    etas = torch.linspace(0, 1.6, 81, dtype=torch.float64)
    ax = fig.canvas.subplots()
    ax.plot(etas, etas * float(x @ X.T @ Y), label="prediction after one step of size eta")
    ax.axhline(value, color="C1", linestyle="--", label="linear attention, Q = x, K = X, V = Y")
    ax.axhline(least, color="C2", linestyle=":", label="least squares, where many small steps end")
    ax.plot(1, value, "o", color="black")
    ax.annotate("eta = 1", (1, value), xytext=(8, -14), textcoords="offset points")
    if top < 1.6:
        ax.axvspan(top, 1.6, color=GREY, alpha=0.12, linewidth=0)
        ax.text(1.59, 0.02, "the loss rises", ha="right", fontsize=8, transform=ax.get_xaxis_transform())
    ax.set_xlim(0, 1.6)
    ax.set_xlabel("step size eta")
    ax.set_ylabel("prediction at the query")
    ax.legend(loc="best")


@claim("softmax-attention-kernel-smoother")
def softmax_attention_kernel_smoother(lab: Lab) -> Iterator[Finding]:
    yield lab.exact("the weighted mean minimises", _minimiser_symbolic(normalised=not lab.broken))
    yield lab.exact("a gradient step and a Newton step land on it", _steps_symbolic(normalised=not lab.broken))
    yield lab.exact("exp(q.k) is a Gaussian with prior weights", _gaussian_symbolic())
    error, bound = _engine_against_mean(lab)
    yield lab.numerical("the engine's attention is the weighted mean", error, bound)
    shifted, linear_shift = _translation(lab)
    yield lab.numerical("moving all values moves the output", linear_shift if lab.broken else shifted, 1e-12)
    yield lab.numerical("linear attention does not pass a shift on", linear_shift, None, low=0.1)
    additive, gap = _additivity(lab)
    yield lab.numerical("not one fixed W", additive if lab.broken else gap, None, low=0.1, linear_attention=additive)
    error, bound = _functional_step(lab)
    yield lab.numerical("unnormalised: one functional step", error, bound)


def _weights(normalised: bool) -> tuple[Any, Any, Any]:
    """Three weights e^s_i / sum (broken: e^s_i), three targets, and c."""
    raw = [sp.exp(s) for s in sp.symbols("s0:3", real=True)]
    weights = [w / sum(raw) for w in raw] if normalised else raw
    return weights, sp.symbols("y0:3", real=True), sp.Symbol("c", real=True)


def _minimiser_symbolic(normalised: bool) -> bool:
    """The minimiser of sum w_i (y_i - c)² is attention's output sum w_i y_i."""
    weights, targets, centre = _weights(normalised)
    objective = sum(w * (y - centre) ** 2 for w, y in zip(weights, targets, strict=True))
    [best] = sp.solve(sp.diff(objective, centre), centre)
    output = sum(w * y for w, y in zip(weights, targets, strict=True))
    convex = sp.simplify(sp.diff(objective, centre, 2)).is_positive
    return bool(sp.simplify(best - output) == 0 and convex is not False)


def _steps_symbolic(normalised: bool) -> bool:
    weights, targets, centre = _weights(normalised)
    loss = sum(w * (y - centre) ** 2 for w, y in zip(weights, targets, strict=True)) / 2
    output = sum(w * y for w, y in zip(weights, targets, strict=True))
    slope, curvature = sp.diff(loss, centre), sp.diff(loss, centre, 2)
    gradient_step = 0 - slope.subs(centre, 0)
    newton = centre - slope / curvature
    return bool(sp.simplify(gradient_step - output) == 0 and sp.simplify(newton - output) == 0)


def _gaussian_symbolic() -> bool:
    q, k = (sp.Matrix(sp.symbols(f"{name}0:3", real=True)) for name in "qk")
    exponent = q.dot(q) / 2 + k.dot(k) / 2 - (q - k).dot(q - k) / 2
    return sp.expand(exponent - q.dot(k)) == 0


def _regression_data(lab: Lab, stream: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = lab.torch_rng(stream)
    q, k, v = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((7, 3), (20, 3), (20, 2)))
    return q, k, v


def _engine_against_mean(lab: Lab) -> tuple[float, float]:
    q, k, v = _regression_data(lab)
    out = attend(q, k, v, linear=lab.broken)
    smoothed = torch.stack([_smoother(row, k, v) for row in q])
    return max_difference(out, smoothed), 1e-12


def _smoother(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Nadaraya and Watson's estimate, with the kernel as a Gaussian times prior weights."""
    closeness = (-(keys - query).square().sum(1) / 2).exp() * (keys.square().sum(1) / 2).exp()
    return (closeness[:, None] * values).sum(0) / closeness.sum()


def _translation(lab: Lab) -> tuple[float, float]:
    """How far output(V + c) is from output(V) + c, for softmax and for linear attention."""
    q, k, v = _regression_data(lab)
    shift = torch.tensor([3.0, -2.0], dtype=torch.float64)
    off = [(attend(q, k, v + shift, linear=x) - attend(q, k, v, linear=x) - shift).abs().max() for x in (False, True)]
    return float(off[0]), float(off[1])


def _additivity(lab: Lab) -> tuple[float, float]:
    """|f(q1 + q2) - f(q1) - f(q2)|, largest, for linear and for softmax attention."""
    q, k, v = _regression_data(lab)
    gaps = []
    for linear in (True, False):
        both, first, second = (attend(x, k, v, linear=linear) for x in (q[:3] + q[3:6], q[:3], q[3:6]))
        gaps.append(float((both - first - second).abs().max()))
    return gaps[0], gaps[1]


def _functional_step(lab: Lab) -> tuple[float, float]:
    """sum_i e^{q k_i} y_i against one step from zero on the weights of the features q^j/sqrt(j!), width one."""
    q, k, v = (x[:, :1] for x in _regression_data(lab))
    order = torch.arange(40, dtype=torch.float64)
    scale = torch.exp(-torch.lgamma(order + 1) / 2)

    def features(x: Tensor) -> Tensor:
        return x**order * scale

    weights = torch.zeros(40, 1, dtype=torch.float64, requires_grad=True)
    (0.5 * (features(k) @ weights - v).square().sum()).backward()
    assert weights.grad is not None
    stepped = features(q) @ (weights - weights.grad)
    attention = (q @ k.T).exp() @ v
    reach = float((q @ k.T).abs().max())
    rest = reach**40 / math.factorial(40) * math.exp(reach) * float(v.abs().sum())
    return float((stepped - attention).detach().abs().max()), rest + 1e-12 * math.exp(reach)


@figure("softmax-attention-kernel-smoother", "One-dimensional regression by attention over 24 examples")
def draw_smoother(lab: Lab, fig: Figure) -> None:
    rng = lab.rng(2)
    x = torch.tensor(sorted(rng.uniform(-3, 3, 24)), dtype=torch.float64)
    y = torch.sin(1.5 * x) + 0.1 * torch.tensor(rng.standard_normal(24))
    grid = torch.linspace(-3.3, 3.3, 200, dtype=torch.float64)
    ax = fig.canvas.subplots()
    ax.plot(x, y, "o", color="black", markersize=4, label="examples (x_i, y_i)")
    for width in (0.3, 1.0):
        keys, queries = _on_circle(x, width), _on_circle(grid, width)
        out = attend(queries, keys, y[:, None], scale=1.0)
        ax.plot(grid, out[:, 0], label=f"softmax attention, width {width}")
    linear = attend(grid[:, None], x[:, None], y[:, None], linear=True)[:, 0]
    ax.plot(grid, linear / float((x**2).sum()), label="linear attention over |X|²: a line")
    ax.axhline(0, color=GREY, linewidth=0.5)
    ax.set_ylim(-1.8, 2.6)
    ax.set_xlabel("query x")
    ax.set_ylabel("output")
    ax.legend(loc="upper left", ncols=2)


def _on_circle(x: Tensor, width: float, radius: float = 12.0) -> Tensor:
    """Points of a circle so large that chords are nearly |x - x'|: keys of equal norm, hence Gaussian weights."""
    angle = x / radius
    return torch.stack([angle.sin(), angle.cos()], 1) * radius / width
