"""Why a cached call differs from the full pass: the first attention in which they part, and what parts there.

At the first layer that differs, the input of the layer is still right. So if the new token's value vector is off, or
its query and key are, its position is wrong; if old keys or values are, the cache is; if only the hidden keys differ,
the mask.
"""

from typing import Any

import torch
from torch import Tensor

from glassformer.checks.measure import gap, rms
from glassformer.checks.subject import Subject, layer_of
from glassformer.checks.trace import Attention, as_heads, hidden_keys, trace_call

Cause = tuple[str | None, str, int | None]


def explain_step(
    subject: Subject, rows: int, sizes: list[int], piece: int, warm: float, first: int | None, **given: Any
) -> Cause:
    """(diagnosis, words, layer) for the piece of a plan that went wrong; (None, "", None) where the trace is silent."""
    try:
        with subject.patient(warm) as patient:
            tokens = patient.tokens(rows, min(sum(sizes), patient.limit), seed=sum(sizes) + rows)
            start = sum(sizes[:piece])
            end = start + sizes[piece]
            cache = patient.new_cache()
            done = 0
            for size in sizes[:piece]:
                _, cache = patient.call(tokens[:, done : done + size], cache=cache, with_cache=True, **given)
                done += size
            cached = trace_call(patient, tokens[:, start:end], cache=cache, with_cache=True, **given)
        with subject.patient(warm) as patient:
            full = trace_call(patient, tokens[:, :end], **given)
    except Exception:
        return None, "", None
    blocks = subject.blocks()
    news = end - start
    pairs = [
        (c, f) for c, f in zip(_own(cached.attentions, rows, news), _own(full.attentions, rows, end), strict=False)
    ]
    for one, other in pairs:
        found = _part(one, other, rows, news, subject)
        if found is not None:
            at = layer_of(one.path, blocks)
            return found[0], f"layer {at[1]}: {found[1]}" if at else found[1], at[1] if at else None
    return None, "", None


def _own(attentions: list[Attention], rows: int, queries: int) -> list[Attention]:
    """Attentions with as many queries as tokens were given."""
    found = []
    for one in attentions:
        scores = as_heads(one.scores, rows)
        if scores is not None and scores.shape[-2] == queries:
            found.append(one)
    return found


def vectors(one: Attention, rows: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """q (B,H,T,K), k (B,H,S,K), v (B,H,S,U)."""
    if one.v is None:
        return None
    q, k, v = as_heads(one.q, rows), as_heads(one.k, rows), as_heads(one.v, rows)
    if q is None or k is None or v is None:
        return None
    scores = as_heads(one.scores, rows)
    assert scores is not None
    if k.shape[-2] != scores.shape[-1]:
        k = k.transpose(-1, -2)
    return q, k, v


def _differs(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or gap(a, b) > 1e-4 * max(rms(b), 1e-12)


def _part(one: Attention, other: Attention, rows: int, news: int, subject: Subject) -> tuple[str, str] | None:
    """What differs between a cached attention and the same one of the full pass; None when nothing does."""
    mine, theirs = vectors(one, rows), vectors(other, rows)
    if mine is None or theirs is None:
        return None
    (q, k, v), (q2, k2, v2) = mine, theirs
    window = subject.facts.whole("window")
    if _differs(v[:, :, -news:], v2[:, :, -news:]):
        return "decode_position", "the new token enters with another vector: its position embedding is another one"
    if _differs(q, q2[:, :, -news:]) or _differs(k[:, :, -news:], k2[:, :, -news:]):
        return "decode_position", "the new token's query or key is rotated to another position"
    scores, scores2 = as_heads(one.scores, rows), as_heads(other.scores, rows)
    assert scores is not None
    assert scores2 is not None
    scores2 = scores2[:, :, -news:]
    hidden, hidden2 = hidden_keys(scores), hidden_keys(scores2)
    visible, visible2 = int((~hidden).sum(-1).max()), int((~hidden2).sum(-1).max())
    if k.shape[2] != k2.shape[2]:
        if window is not None and visible != visible2 and k2.shape[2] >= window:
            return "window", f"{visible} keys are visible, {visible2} without a cache"
        if visible == visible2 and window is not None:
            return None  # a window's cache may forget what nobody sees
        return "cache_mismatch", f"{k.shape[2]} keys are there, {k2.shape[2]} should be"
    if _differs(v[:, :, :-news], v2[:, :, :-news]) or _differs(k[:, :, :-news], k2[:, :, :-news]):
        return "cache_mismatch", "keys or values of earlier tokens are not what they were"
    if not torch.equal(hidden, hidden2):
        if window is not None and k2.shape[2] > window and visible != visible2:
            return "window", f"{visible} keys are visible, {visible2} without a cache"
        return "cache_mask", f"{visible} of {k.shape[2]} keys are visible, {visible2} without a cache"
    if _differs(torch.where(hidden, 0.0, scores), torch.where(hidden2, 0.0, scores2)):
        return "decode_position", "the scores' position bias (ALiBi, relative) is that of other places"
    return None
