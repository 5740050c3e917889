"""Why two streams differ that were made from the same: embedding, norms, activation, residual sums."""

import math
from dataclasses import replace

from torch import Tensor

from glassformer.anatomy import fits
from glassformer.anatomy.fits import distance
from glassformer.doctor.compare.scene import EXACT, Explanation, Scene, column_order, named


def explain_tokens(s: Scene) -> Explanation | None:
    factor, left = fits.fit_factor(s.a.value, s.b.value)
    if s.explains(left):
        return Explanation("embedding_scale", f"B's token vectors are A's times {named(factor, s)}", left)
    return Explanation("weights", "the token tables hold different numbers", math.inf)


def explain_embed(s: Scene) -> Explanation | None:
    tokens, x, y = s.parts[0].embedded, s.a.value, s.b.value
    if tokens is None or tokens.shape != x.shape:
        return None
    factor, left = fits.fit_factor(x, y)
    if s.explains(left):
        return Explanation("embedding_scale", f"B's embedding is A's times {named(factor, s)}", left)
    for c, p, q in _positions(tokens, x, y):
        where = "" if c == 1 else f" (tokens times {c:.6g} in B)"
        for shift in (1, -1, 2, -2):
            one, two = (p[shift:], q[:-shift]) if shift > 0 else (p[:shift], q[-shift:])
            left = distance(one, two)
            if s.explains(left):
                far = f"{abs(shift)} {'later' if shift > 0 else 'earlier'}"
                return Explanation("position_offset", f"B reads the position table {far} than A does{where}", left)
        for name, gone, kept in (("B", q, p), ("A", p, q)):
            if float(gone.abs().max()) < EXACT * max(1.0, float(kept.abs().max())):
                return Explanation(
                    "position_missing", f"{name} adds no position vectors{where}", float(gone.abs().max())
                )
        times, left = fits.fit_factor(p, q)
        if s.explains(left) and abs(times - 1) > EXACT:
            text = f"the position vectors that B adds are A's times {times:.6g}{where}"
            return Explanation("position_twice", text, left)
        order = None if s.explains(distance(p, q)) else column_order(p, q)
        if order is not None:
            text = (
                "B's position vectors hold A's components in another order (sines and cosines interleaved or in halves)"
            )
            return Explanation("position_layout", text, distance(p[:, order], q))
        same = distance(p, q)
        if c != 1 and s.explains(same):
            text = f"token vectors are multiplied by {named(c, s)} in B before positions are added"
            return Explanation("embedding_scale", text, same)
    for source in reversed(_shared_sums(s)):
        found = explain_norm(replace(s, a=replace(s.a, source=source)))
        if found is not None:
            return replace(found, convention="embedding_norm") if found.convention == "norm_placement" else found
    fits_both = fits.fit_norm(x, y), fits.fit_norm(y, x)
    if any(s.explains(f.residual) for f in fits_both):
        which, fit = ("B", fits_both[0]) if fits_both[0].residual <= fits_both[1].residual else ("A", fits_both[1])
        return Explanation("embedding_norm", f"{which} norms the embedding once more: {fit.norm}", fit.residual)
    return None


def _shared_sums(s: Scene) -> list[Tensor]:
    """What both embeddings were made from: token and position vectors added, before a norm."""
    stack = s.a.name.removesuffix("embed")
    mine, theirs = (next((b.before for b in p.blocks if b.attention.stack == stack), []) for p in s.parts)
    return [x for x in mine if any(distance(x, y) < 1e-9 for y in theirs)]


def _positions(tokens: Tensor, x: Tensor, y: Tensor) -> list[tuple[float, Tensor, Tensor]]:
    """What is added to the token vectors in A and in B, (T,D) each, for a factor on B's tokens; only if rows agree."""
    p = x - tokens
    # a position vector is the same in every row: the factor on the tokens is what makes it so
    spread = tokens[1:] - tokens[:-1]
    c, _ = fits.fit_factor(spread, y[1:] - y[:-1])
    found = []
    for factor in dict.fromkeys((1.0, round(c, 12))):
        q = y - factor * tokens
        if distance(q[0], q[-1]) < EXACT * 10 or float(q.abs().max()) < EXACT:
            found.append((factor, p[0], q[0]))
    return found


def explain_norm(s: Scene) -> Explanation | None:
    x = s.a.source
    if x is None or x.shape != s.a.value.shape:
        return None
    one, two = fits.fit_norm(x, s.a.value), fits.fit_norm(x, s.b.value)
    if not (one.residual < EXACT * 10 and two.residual < EXACT * 10):
        return None
    final = "final_norm" if s.a.kind == "final" else "norm_placement"
    if "none" in (one.norm.kind, two.norm.kind) and one.norm.kind != two.norm.kind:
        without, norm = ("A", two.norm) if one.norm.kind == "none" else ("B", one.norm)
        other = "B" if without == "A" else "A"
        return Explanation(
            final, f"{other} norms here with {norm}, {without} does not", max(one.residual, two.residual)
        )
    known, left = fits.norm_with(one, x, s.b.value)
    backwards, right = fits.norm_with(two, x, s.a.value)
    a, b, residual = (str(one.norm), str(known), left) if left <= right else (str(backwards), str(two.norm), right)
    if not s.explains(residual):
        if one.norm.kind == two.norm.kind and abs(one.norm.eps - two.norm.eps) <= 1e-3 * one.norm.eps:
            return Explanation("weights", f"both are {one.norm}, with other weights", math.inf)
        a, b, residual = str(one.norm), str(two.norm), max(one.residual, two.residual)
    first, second = (one.norm, known) if left <= right else (backwards, two.norm)
    if first.kind != second.kind:
        name = "norm_kind"
    elif first.unbiased != second.unbiased:
        name = "norm_variance"
    else:
        name = "norm_eps"
    return Explanation(name, f"A is {a}, B is {b}", residual)


def explain_activation(s: Scene) -> Explanation | None:
    mine, theirs = s.a.pieces, s.b.pieces
    if len(mine) == len(theirs) == 2 and distance(mine[0], theirs[1]) < distance(mine[0], theirs[0]):
        theirs = theirs[::-1]  # in A's order
    a, left = fits.fit_activation(mine, s.a.value)
    b, right = fits.fit_activation(theirs, s.b.value)
    if max(left, right) > 1e-5 or a == b:
        return None
    name = "gelu_variant" if "GELU" in a and "GELU" in b else "activation"
    if a.split(" of the ")[0] == b.split(" of the ")[0]:
        name = "gate_order"
    return Explanation(name, f"A applies {a}, B applies {b}", max(left, right))


def explain_sum(s: Scene) -> Explanation | None:
    x, block = s.a.source, s.a.block
    if x is None or block is None:
        return None
    feeding = s.a.name.endswith("feedforward.sum")
    branch = (
        block.feed.down.out
        if feeding and block.feed
        else block.attention.merged.out
        if block.attention.merged
        else None
    )
    read = (
        block.feed.first[0].read
        if feeding and block.feed and block.feed.first
        else block.attention.projections["q"].read
    )
    if branch is None:
        return None
    for who, here in (("B", s.b.value), ("A", s.a.value)):
        if distance(x + branch, here) < EXACT * 1e-3:
            continue
        if s.explains(distance(read + branch, here)):
            text = f"{who} adds the branch to the normed input instead of the stream"
            return Explanation("residual", text, distance(read + branch, here))
        if s.explains(distance(branch, here)):
            return Explanation("residual", f"{who} does not add the stream", distance(branch, here))
        factor, left = fits.fit_factor(branch, here - x)
        if s.explains(left):
            return Explanation("residual_factor", f"{who} multiplies the branch by {factor:.6g}", left)
        norm = fits.fit_norm(branch, here - x)
        if s.explains(norm.residual):
            return Explanation(
                "norm_placement", f"{who} norms the branch before it is added: {norm.norm}", norm.residual
            )
    return None
