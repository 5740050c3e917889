"""Scaled dot-product attention in NumPy, and tests that distinguish it from its common mistakes."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.model.attention import explicit_attention
from glassformer.reference.attention import attention as oracle_attention
from glassformer.reference.ops import softmax
from glassformer.theory.claims.claim import Lab, claim
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import one_layer, refusal

Array = NDArray[np.float64]
Attend = Callable[[Array, Array, Array], Array]
Shape = tuple[int, int, int, int]
"""n_q, n_k, d_k, d_v."""
FORCED: tuple[Shape, ...] = ((1, 1, 1, 1), (1, 7, 3, 2), (6, 1, 4, 5), (5, 5, 5, 5), (4, 4, 4, 3), (8, 3, 1, 6))
"""One token, one query, one key, square shapes (where a forgotten transpose does not show), d_k = 1."""


def scaled_dot_product_attention(q: Array, k: Array, v: Array, mask: NDArray[np.bool_] | None = None) -> Array:
    """softmax(q k^T / sqrt(d_k)) v: q (n_q, d_k), k (n_k, d_k), v (n_k, d_v) -> (n_q, d_v).

    `mask` (n_q, n_k) is True where a query may attend. Softmax is over keys and subtracts each row's maximum, so no
    score is too large; a row without any allowed key raises an error, because 0/0 is undefined.
    """
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores) @ v


def by_oracle(q: Array, k: Array, v: Array) -> Array:
    """The oracle's layer, driven by projections that pick q, k and v out of its two inputs."""
    (n_q, d_k), (n_k, d_v) = q.shape, v.shape
    config = one_layer(c.EncoderConfig, d_model=d_v, attention=c.Attention(1, d_head=d_k, d_value=d_v, bias=False))
    picks = np.eye(d_k + d_v)
    weights = {"q.weight": np.eye(d_k), "k.weight": picks[:d_k], "v.weight": picks[d_k:], "o.weight": np.eye(d_v)}
    memory = np.concatenate([k, v], 1)[None]
    return oracle_attention(config, weights, q[None], memory, np.ones((1, n_q, n_k), dtype=np.bool_))[0][0]


def by_engine(q: Array, k: Array, v: Array) -> Array:
    """The engine's explicit path."""
    queries, keys, values = (torch.from_numpy(np.ascontiguousarray(x))[None, None] for x in (q, k, v))
    return explicit_attention(queries, keys, values, 1 / math.sqrt(q.shape[-1]))[0, 0].numpy()


def _no_scale(q: Array, k: Array, v: Array) -> Array:
    return softmax(q @ k.T) @ v


def _column_softmax(q: Array, k: Array, v: Array) -> Array:
    return softmax((q @ k.T / math.sqrt(q.shape[-1])).T).T @ v


def _not_transposed(q: Array, k: Array, v: Array) -> Array:
    """Goes unnoticed where keys are square: no shape complains."""
    keys = k if k.shape[0] == k.shape[1] else k.T
    return softmax(q @ keys / math.sqrt(q.shape[-1])) @ v


def _scale_by_width(q: Array, k: Array, v: Array) -> Array:
    return softmax(q @ k.T / q.shape[-1]) @ v


MUTANTS: dict[str, Attend] = {
    "no scale": _no_scale,
    "softmax over columns": _column_softmax,
    "keys not transposed": _not_transposed,
    "scale by d_k": _scale_by_width,
}


def shapes(lab: Lab) -> list[Shape]:
    """Twenty: the forced ones and random ones."""
    rng = lab.rng(1)
    drawn = [tuple(int(n) for n in rng.integers(1, 10, 4)) for _ in range(20 - len(FORCED))]
    return [*FORCED, *((a, b, d, e) for a, b, d, e in drawn)]


def inputs(lab: Lab, shape: Shape) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng([lab.seed, 2, *shape])
    n_q, n_k, d_k, d_v = shape
    q, k, v = (2 * rng.standard_normal(s) for s in ((n_q, d_k), (n_k, d_k), (n_k, d_v)))
    return q, k, v


def exact_attention(q: Array, k: Array, v: Array) -> Array:
    """The definition with 50 digits, without subtracting a maximum."""
    with mpmath.workdps(50):
        Q, K, V = (mpmath.matrix(x.tolist()) for x in (q, k, v))
        weights = (Q * K.T / mpmath.sqrt(q.shape[1])).apply(mpmath.exp)
        out = weights * V
        rows = [[float(out[i, j] / mpmath.fsum(weights[i, :])) for j in range(V.cols)] for i in range(Q.rows)]
    return np.array(rows)


def tolerance(q: Array, k: Array, v: Array) -> float:
    """(64 + 4 n) u (1 + max|s|) max|v|: rounding a score by u|s| changes its exponential by that share, and n weights
    are summed."""
    largest = float(np.abs(q @ k.T).max()) / math.sqrt(q.shape[1])
    return (64 + 4 * len(k)) * UNIT * (1 + largest) * float(np.abs(v).max())


def worst_error(attend: Attend, cases: list[tuple[Any, Any]]) -> float:
    """Largest error over its tolerance among ((q, k, v), exact) cases; infinite where a shape or a number is wrong."""
    worst = 0.0
    for given, exact in cases:
        out = attend(*given)
        if out.shape != exact.shape or not np.isfinite(out).all():
            return math.inf
        worst = max(worst, max_difference(out, exact) / tolerance(*given))
    return worst


@claim("numpy-attention")
def numpy_attention(lab: Lab) -> Iterator[Finding]:
    cases = [(given, exact_attention(*given)) for given in (inputs(lab, shape) for shape in shapes(lab))]
    subject: Attend = _no_scale if lab.broken else scaled_dot_product_attention
    for name, attend in {"NumPy": subject, "the oracle": by_oracle, "the engine": by_engine}.items():
        yield lab.numerical(
            f"{name} against 50 digits", worst_error(attend, cases), 1, shapes=[list(shape) for shape in shapes(lab)]
        )
    for part, error in permutation_errors(subject, cases).items():
        yield lab.numerical(part, error, 2)
    big = [1e4 * x for x in inputs(lab, (5, 6, 4, 3))[:2]]
    values = inputs(lab, (5, 6, 4, 3))[2]
    out = subject(big[0], big[1], values)
    yield lab.numerical(
        "scores beyond 1e4",
        float(np.abs(out).max()) if np.isfinite(out).all() else math.inf,
        float(np.abs(values).max()) * (1 + 64 * UNIT),
        largest_score=float(np.abs(big[0] @ big[1].T).max()) / 2,
    )
    yield _mask_hides(lab)
    survivors = [name for name, mutant in MUTANTS.items() if worst_error(mutant, cases) <= 1]
    yield lab.exact(
        "every mutant is rejected",
        not survivors,
        survivors=survivors,
        errors={name: worst_error(mutant, cases) for name, mutant in MUTANTS.items()},
    )


def permutation_errors(attend: Attend, cases: list[tuple[Any, Any]]) -> dict[str, float]:
    """How far from equivariant, over the tolerance: queries alone, all three together, keys with their values."""
    worst = {"rows of Q alone": 0.0, "rows of Q, K and V": 0.0, "rows of K and V together": 0.0}
    for (q, k, v), _ in cases:
        out, bound = attend(q, k, v), tolerance(q, k, v)
        order, other = np.arange(len(q))[::-1], np.roll(np.arange(len(k)), 1)
        found = {"rows of Q alone": (attend(q[order], k, v), out[order])}
        found["rows of K and V together"] = (attend(q, k[other], v[other]), out)
        if len(q) == len(k):
            found["rows of Q, K and V"] = (attend(q[order], k[order], v[order]), out[order])
        for part, (moved, wanted) in found.items():
            worst[part] = max(worst[part], max_difference(moved, wanted) / bound)
    return worst


def _mask_hides(lab: Lab) -> Finding:
    """Hidden keys may hold anything; a row that sees nothing is refused."""
    q, k, v = inputs(lab, (4, 6, 3, 2))
    mask = np.ones((4, 6), dtype=np.bool_)
    mask[:, 3:] = False
    keys, values = (np.concatenate([x[:3], 1e6 * np.ones_like(x[3:])]) for x in (k, v))
    hidden = np.array_equal(
        scaled_dot_product_attention(q, k, v, mask), scaled_dot_product_attention(q, keys, values, mask)
    )
    mask[0] = False
    refused = bool(refusal(scaled_dot_product_attention, q, k, v, mask))
    return lab.exact("a mask hides keys", hidden and refused, same_output=hidden, empty_row_refused=refused)
