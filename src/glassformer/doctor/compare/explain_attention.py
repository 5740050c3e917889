"""Why two attentions differ that read the same: projections, rotation, heads, mask, scale, softmax."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from glassformer.anatomy import fits
from glassformer.anatomy.fits import distance
from glassformer.anatomy.parts import Attention, visible
from glassformer.anatomy.roles import Role
from glassformer.doctor.compare.explain_linear import linear_convention, part_of
from glassformer.doctor.compare.scene import EXACT, Explanation, Scene, column_order, named, reordered
from glassformer.doctor.subject.measure import many


def explain_projected(s: Scene) -> Explanation | None:
    """A projection of the heads: order of q, k, v; order of heads or components; transposed weight; bias."""
    block = s.a.block
    assert block is not None
    name, theirs = s.a.name[-1], s.b.value
    for one in ("q", "k", "v"):
        mine = block.attention.flat.get(one)
        if one != name and mine is not None and s.explains(distance(mine, theirs)):
            text = f"what B takes for {name} is what A takes for {one}"
            # a projection of values that is not read gets no gradient, and the doctor names that
            fault = "dead_gradient" if name == "v" else None
            return Explanation("qkv_order", text, distance(mine, theirs), fault)
    mine = s.a.value
    pool = [t for t in block.attention.flat.values() if t.shape[2:] == mine.shape[2:]]
    columns = torch.cat([t.permute(0, 2, 1, 3).flatten(2) for t in pool], -1).flatten(0, 1)
    wanted = theirs.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    own = mine.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    left = reordered(own, wanted)
    if left is not None:
        text = (
            "B has A's columns in another order: heads, or the components of a head (as the other rotary pairing wants)"
        )
        return Explanation("head_order", text, left)
    order = column_order(columns, wanted)
    if order is not None and distance(own, wanted) > EXACT:
        text = f"B's {name} is gathered from columns of A's q, k and v: the fused projection is split another way"
        return Explanation("qkv_order", text, distance(columns[:, order], wanted))
    first, second = part_of(s.a.projection, mine), part_of(s.b.projection, theirs)
    return None if first is None or second is None else linear_convention(first, second, s)


def explain_turned(s: Scene) -> Explanation | None:
    """Queries or keys after rotation (and norm): pairing, base, first position, direction; order of shared heads."""
    name = s.a.kind
    one, two = _turning(s.a), _turning(s.b)
    moved = explain_values(s)
    if moved is not None:
        return moved
    fit_a, fit_b = _rotation(one, name), _rotation(two, name)
    if fit_a is None or fit_b is None:
        return _head_norm(one, two, name, fit_a, fit_b)
    if fit_a.still and fit_b.still:
        return None
    residual = max(fit_a.residual, fit_b.residual)
    text = f"A: {fit_a}; B: {fit_b}"
    if fit_a.still != fit_b.still:
        return Explanation("rope_missing", f"{'A' if fit_a.still else 'B'} does not rotate. {text}", residual)
    if fit_a.pairing != fit_b.pairing:
        return Explanation("rope_pairing", text, residual)
    if fit_a.rotated != fit_b.rotated:
        return Explanation("rope_fraction", text, residual)
    if float(fit_a.frequencies[0]) * float(fit_b.frequencies[0]) < 0:
        return Explanation("rope_direction", text, residual)
    if distance(fit_a.frequencies, fit_b.frequencies) > 1e-5:
        factor, left = fits.fit_factor(fit_a.frequencies, fit_b.frequencies)
        text += f"; B's frequencies are A's times {factor:.6g}" if left < 1e-5 else ""
        return Explanation("rope_base", text, residual)
    if abs(fit_a.start - fit_b.start) > 1e-3:
        return Explanation("position_offset", text, residual)
    return None


def _attention(role: Role) -> Attention:
    assert role.block is not None
    return role.block.attention


def _turning(role: Role) -> Attention:
    attention = _attention(role)
    return replace(attention, q=role.value) if role.kind == "q" else replace(attention, k=role.value)


def _rotation(attention: Attention, name: str) -> fits.RotationFit | None:
    flat, turned = attention.flat.get(name), {"q": attention.q, "k": attention.k, "v": attention.v}[name]
    if flat is None:
        return None
    if flat.shape[1] != turned.shape[1]:
        turned = turned[:, :: turned.shape[1] // flat.shape[1]]
    return fits.fit_rotation(flat, turned)


def _head_norm(
    one: Attention, two: Attention, name: str, fit_a: fits.RotationFit | None, fit_b: fits.RotationFit | None
) -> Explanation | None:
    """One side only turns, the other does not even do that: a norm of queries and keys?"""
    for who, other, fit in (("B", two, fit_a), ("A", one, fit_b)):
        flat, turned = other.flat.get(name), other.q if name == "q" else other.k
        if fit is None or flat is None or flat.shape != turned.shape:
            continue
        back = turned if fit.still else fits.turn(turned, fit, backwards=True)
        norm = fits.fit_norm(flat.transpose(1, 2), back.transpose(1, 2))
        if norm.residual < 1e-5 and norm.norm.kind != "none":
            text = f"{who} norms {name} of each head with {norm.norm}, the other does not"
            return Explanation("qk_norm", text, norm.residual)
    return None


def _head_order(mine: Tensor, theirs: Tensor) -> tuple[list[int], float] | None:
    """Which of A's heads each of B's is and what that leaves, where every one is one and the order is not A's."""
    mine, theirs = (t / t.square().mean().sqrt().clamp(min=1e-300) for t in (mine, theirs))
    order, worst = [], 0.0
    for h in range(theirs.shape[1]):
        near = [distance(mine[:, g], theirs[:, h]) for g in range(mine.shape[1])]
        # heads that share keys are equal: its own index comes first
        best = h if near[h] < EXACT else min(range(len(near)), key=near.__getitem__)
        if near[best] > EXACT:
            return None
        order.append(best)
        worst = max(worst, near[best])
    return (order, worst) if order != list(range(len(order))) else None


def explain_values(s: Scene) -> Explanation | None:
    """Heads in another order; with shared keys and values, another one is read."""
    found = _head_order(s.a.value, s.b.value)
    if found is None:
        return _rotated_values(s) if s.a.kind == "v" else None
    order, left = found
    heads = ", ".join(map(str, order))
    shared = _attention(s.a).flat.get(s.a.kind, s.a.value).shape[1] < s.a.value.shape[1]
    if shared:
        text = f"in B, query heads 0 to {len(order) - 1} use the {s.a.kind} of A's heads {heads}"
        return Explanation("gqa_order", text, left)
    return Explanation("head_order", f"B's heads are A's heads {heads}", left)


def _rotated_values(s: Scene) -> Explanation | None:
    """One of them rotates v by position."""
    one, two = (_rotation(_attention(role), "v") for role in (s.a, s.b))
    if one is None or two is None or one.still == two.still:
        return None
    text = f"{'B' if one.still else 'A'} rotates v by position, the other does not. A: {one}; B: {two}"
    return Explanation("rope_values", text, max(one.residual, two.residual))


def explain_mask(s: Scene) -> Explanation | None:
    """Describe both masks. The visible keys are read, not fitted, so there is no residual."""
    a, b = fits.describe_mask(s.a.value), fits.describe_mask(s.b.value)
    more = (s.b.value > s.a.value).flatten(0, 1).any(0)
    T, S = more.shape
    later = torch.arange(S)[None] > torch.arange(T)[:, None] + S - T
    text = f"a query of A sees: {a}; of B: {b} (they differ at {many(int((s.a.value != s.b.value).sum()), 'position')})"
    fault = "causal_leak" if bool((more & later).any()) else "window" if "window" in a + b else "over_mask"
    return Explanation("mask", text, math.inf, fault)


def explain_scores(s: Scene) -> Explanation | None:
    one, two = _attention(s.a), _attention(s.b)
    seen = visible(one).bool() & visible(two).bool()
    x, y = s.a.value[seen], s.b.value[seen]
    rounded = _softmax_dtypes(one, two, distance(x, y))
    if rounded is not None:
        return rounded
    factor, left = fits.fit_factor(x, y)
    if s.explains(left) and abs(factor - 1) > EXACT:
        a, b = _scale(one, s), _scale(two, s)
        factors = f": A multiplies q·k by {a}, B by {b}" if a and b else ""
        return Explanation("attn_scale", f"B's scores are A's times {factor:.6g}{factors}", left)
    scales = [_scale_of(one), _scale_of(two)]
    if scales[0] and scales[1] and abs(scales[0] / scales[1] - 1) > 1e-6:
        text = f"A multiplies q·k by {named(scales[0], s, one)}, B by {named(scales[1], s, two)}, and both add a bias"
        made = one.scores + (scales[1] / scales[0] - 1) * _dots_in_scores(one)
        return Explanation("attn_scale", text, distance(made[seen], y))
    for who, plain, capped in (("B", x, y), ("A", y, x)):
        cap, left = fits.fit_softcap(plain, capped)
        if s.explains(left):
            return Explanation("softcap", f"{who} caps scores at {cap:.6g}: c·tanh(score / c)", left)
    gap = torch.where(seen, two.scores - one.scores, torch.zeros_like(one.scores))
    for who, bare in (("A", one), ("B", two)):
        other = two if who == "A" else one
        factor, left = fits.fit_factor(bare.dots[seen], bare.scores[seen])
        if s.explains(left) and not s.explains(fits.fit_factor(other.dots[seen], other.scores[seen])[1]):
            text = f"{who} adds no bias to the scores; the other adds one that depends on position"
            return Explanation("position_bias", text, left)
    by_distance = _by_distance(gap, seen)
    if by_distance is not None and s.explains(by_distance):
        text = "the bias on the scores differs, as a function of the distance between query and key"
        return Explanation("position_bias", text, by_distance)
    return None


def _softmax_dtypes(one: Attention, two: Attention, apart: float) -> Explanation | None:
    """One of them casts its scores to a narrower dtype, and rounding to that dtype is all that differs."""
    a, b = (attention.softmax.inputs[0].value.dtype for attention in (one, two))
    narrow = max((a, b), key=lambda dtype: torch.finfo(dtype).eps)
    if a is b or narrow.itemsize > 2 or apart > 4 * torch.finfo(narrow).eps:
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (a, b)]
    return Explanation("softmax_dtype", f"the softmax of A is computed in {names[0]}, that of B in {names[1]}", apart)


def _by_distance(gap: Tensor, seen: Tensor) -> float | None:
    """What is left of a difference when each head's mean at each distance is taken off."""
    T, S = gap.shape[-2:]
    if T != S:
        return None
    left = gap.clone()
    for offset in range(-T + 1, S):
        band, shown = gap.diagonal(offset, -2, -1), seen.diagonal(offset, -2, -1)
        if bool(shown.any()):
            mean = (band * shown).sum((0, 2)) / shown.sum((0, 2)).clamp(min=1)
            left.diagonal(offset, -2, -1).sub_(mean[None, :, None] * shown)
    return distance(gap - left, gap)


def _scale(attention: Attention, s: Scene) -> str:
    scale = _scale_of(attention)
    return "" if scale is None else named(scale, s, attention)


def _scale_of(attention: Attention) -> float | None:
    """The factor on q·k, measured from the projections: a rotation keeps lengths, so lengths tell."""
    factor = _after_product(attention)
    for name, used in (("q", attention.q), ("k", attention.k)):
        flat, whole = attention.flat.get(name), attention.projections.get(name)
        if factor is None or flat is None or whole is None:
            return None
        if flat.shape[1] != used.shape[1]:
            used = used[:, :: used.shape[1] // flat.shape[1]]
        # a projection of its own is read before anything was done to it
        flat = whole.out if whole.out.numel() == flat.numel() else flat
        factor *= float(used.norm() / flat.norm().clamp(min=1e-300))
    return factor


def _after_product(attention: Attention) -> float | None:
    """The factor between the product and the softmax: a bias is the same in every row, so their difference loses it."""
    seen = visible(attention).bool()
    both = seen[:1] & seen[1:]
    scores, dots = (t[:1] - t[1:] for t in (attention.scores, attention.dots))
    factor, left = fits.fit_factor(dots[both], scores[both])
    return factor if left < EXACT else None


def _dots_in_scores(attention: Attention) -> Tensor:
    return attention.dots * (_after_product(attention) or 1.0)


def explain_pattern(s: Scene) -> Explanation | None:
    one, two = _attention(s.a), _attention(s.b)
    if one.axis != two.axis:
        axes = {-1: "keys", -2: "queries", -3: "heads", -4: "the batch"}
        text = f"A takes the softmax over {axes.get(one.axis, one.axis)}, B over {axes.get(two.axis, two.axis)}"
        return Explanation("softmax_axis", text, distance(one.scores.softmax(two.axis), s.b.value))
    return None


def explain_weights(s: Scene) -> Explanation | None:
    """One of them changes the weights after softmax. What both do is not the difference."""
    one, two = _attention(s.a).steps, _attention(s.b).steps
    if one == two:
        return None
    actions = [f"{who} {_steps(steps)}" for who, steps in (("A", one), ("B", two))]
    text = f"after softmax, {actions[0]}; {actions[1]}, before the product with v"
    again = s.a.value if "softmax" in two else s.b.value
    left = distance(again.softmax(-1), s.b.value if "softmax" in two else s.a.value)
    left = left if "softmax" in {*one} ^ {*two} and s.explains(left) else math.inf
    return Explanation("attention_weights", text, left)


def _steps(steps: tuple[str, ...]) -> str:
    if not steps:
        return "uses the attention weights unchanged"
    names = ["softmax again" if step == "softmax" else step for step in steps]
    return f"applies {', '.join(names)} to the attention weights"


def explain_merged(s: Scene) -> Explanation | None:
    left = reordered(s.a.value.flatten(0, 1).flatten(1), s.b.value.flatten(0, 1).flatten(1))
    if left is not None:
        return Explanation("head_layout", "B has A's columns in another order", left)
    one, two = s.a.value.flatten().sort().values, s.b.value.flatten().sort().values
    if s.explains(distance(one, two)):
        text = "the same numbers at other indices: heads and time are merged without the transposition in one of them"
        return Explanation("head_layout", text, distance(one, two))
    return None
