"""Why projections of equal inputs differ: x W + b with the weight transposed, the bias left out, columns moved."""

import math
from dataclasses import replace

from torch import Tensor

from glassformer.anatomy import fits
from glassformer.anatomy.fits import distance
from glassformer.anatomy.parts import Projection
from glassformer.doctor.compare.scene import EXACT, Explanation, Scene, column_order, named, reordered


def explain_linear(s: Scene) -> Explanation | None:
    one, two = s.a.projection, s.b.projection
    if one is None or two is None or one.out.shape != two.out.shape or one.read.shape[-1] != one.weight.shape[0]:
        return None
    return linear_convention(one, two, s)


def linear_convention(one: Projection, two: Projection, s: Scene) -> Explanation | None:
    """x W + b in A; in B the weight transposed, the bias left out, the columns in another order, or other numbers."""
    x, y, W = one.read, two.out, one.weight
    bias = one.bias if one.bias is not None else 0.0
    which = " and ".join(dict.fromkeys(n for n in (_of(one), _of(two)) if n))
    if W.shape[0] == W.shape[1] and s.explains(distance(x @ W.T + bias, y)):
        return Explanation(
            "transposed_weight", f"B multiplies by A's weight transposed ({which})", distance(x @ W.T + bias, y)
        )
    for name, here, there in (("B", one, two), ("A", two, one)):
        plain = distance(here.read @ here.weight, there.out)
        if here.bias is not None and s.explains(plain):
            return Explanation("bias", f"{name} leaves the bias out ({which})", plain)
    if distance(one.out, y) < 1e-12:
        return None
    factor, left = fits.fit_factor(one.out, y)
    if s.explains(left):
        return Explanation("factor", f"B's output is A's times {named(factor, s)} ({which})", left)
    left_over = reordered(one.out.flatten(0, 1), y.flatten(0, 1))
    if left_over is not None:
        return Explanation("column_order", f"B has A's columns in another order ({which})", left_over)
    if two.weight.shape == W.shape and distance(W, two.weight) > 1e-12:
        return Explanation("weights", f"the weights hold different numbers ({which})", math.inf)
    return None


def _of(projection: Projection) -> str:
    return projection.names[0] if projection.names else ""


def part_of(projection: Projection | None, flat: Tensor) -> Projection | None:
    """The columns of a (fused) projection that became these heads, as a projection of their own."""
    if projection is None:
        return None
    wanted = flat.permute(0, 2, 1, 3).flatten(2)
    if projection.out.shape[:2] != wanted.shape[:2]:
        return None
    order = column_order(projection.out.flatten(0, 1), wanted.flatten(0, 1))
    if order is None:
        return None
    bias = None if projection.bias is None else projection.bias[order]
    return replace(projection, out=wanted, weight=projection.weight[:, order], bias=bias)


def explain_logits(s: Scene) -> Explanation | None:
    one, two = s.a.projection, s.b.projection
    if one is None or two is None:
        return None
    factor, left = fits.fit_factor(s.a.value, s.b.value)
    if s.explains(left):
        return Explanation("factor", f"B's logits are A's times {named(factor, s)}", left)
    for who, parts, here, there in (("A", 0, one, two), ("B", 1, two, one)):
        table = s.parts[parts].table
        if table is None or table.shape[-1] != here.read.shape[-1]:
            continue
        other = "B" if who == "A" else "A"
        tied = distance(here.read @ table.T + (here.bias if here.bias is not None else 0.0), here.out)
        free = distance(there.read @ table.T, there.out)
        if tied < EXACT < free and table.shape == s.parts[1 - parts].table.shape:  # type: ignore[union-attr]
            text = f"{who}'s head is its token table (tied), {other}'s is a matrix of its own"
            return Explanation("weight_tying", text, tied)
    for who, plain, capped in (("B", s.a.value, s.b.value), ("A", s.b.value, s.a.value)):
        cap, left = fits.fit_softcap(plain, capped)
        if s.explains(left):
            return Explanation("softcap", f"{who} caps logits at {cap:.6g}: c·tanh(logit / c)", left)
    return linear_convention(one, two, s)
