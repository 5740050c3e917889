"""Why a cached call differs from the full pass: the first attention in which they part, and what parts there.

At the first attention that differs, what it reads is still right. So if the new token's value vector is off, or its
query and key are, its position is wrong; if old keys or values are, the cache is; if only the hidden keys differ, the
mask. Where the tokens enter alike and the attention reads something else all the same, or every attention agrees, a
state outside attention (a recurrence, a convolution) was not continued.
"""

from typing import Any

import torch
from torch import Tensor

from glassformer.anatomy.scores import as_heads, hidden_keys
from glassformer.anatomy.trace import Trace, TracedAttention
from glassformer.doctor.subject.measure import gap, many, rms, visible_keys
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call

Cause = tuple[str | None, str, int | None]


def explain_step(
    subject: Subject, rows: int, sizes: list[int], piece: int, warm: float, first: int | None, **given: Any
) -> Cause:
    """(diagnosis, words, layer) for the piece of a plan that went wrong; (None, "", None) where the trace is silent."""
    try:
        start = sum(sizes[:piece])
        end = start + sizes[piece]
        # a source as long as the target would make the attentions look alike
        source = 13 if end == 11 else 11
        if subject.kind == "seq2seq" and "source" not in given:
            given["source"] = subject.source(rows, source)
        with subject.isolated(warm) as isolated:
            tokens = isolated.tokens(rows, min(sum(sizes), isolated.limit), seed=sum(sizes) + rows)
            cache = isolated.new_cache(rows)
            done = 0
            for size in sizes[:piece]:
                _, cache = isolated.call(tokens[:, done : done + size], cache=cache, with_cache=True, **given)
                done += size
            cached = trace_call(isolated, tokens[:, start:end], cache=cache, with_cache=True, **given)
        with subject.isolated(warm) as isolated:
            full = trace_call(isolated, tokens[:, :end], **given)
    except Exception:
        return None, "", None
    blocks = subject.blocks()
    news = end - start
    pairs = _pairs(_own(cached.attentions, rows, news), _own(full.attentions, rows, end))
    for one, other in pairs:
        found = _part(one, other, rows, news, subject, source)
        if found is not None:
            at = layer_of(one.path, blocks)
            if found[0] == "decode_position" and _reads_otherwise(one, other, cached, full, rows, news):
                found = ("cache_mismatch", "the tokens enter alike and this layer reads something else" + STATE)
            return found[0], f"layer {at[1]}: {found[1]}" if at else found[1], at[1] if at else None
    assert cached.logits is not None
    assert full.logits is not None
    if (pairs or not full.attentions) and _differs(cached.logits, full.logits[:, -news:]):
        words = "every attention agrees" if pairs else "there is no attention"
        return "cache_mismatch", words + STATE, None
    return None, "", None


STATE = ": a state outside attention (of a recurrence or a convolution) is not continued"


def _reads_otherwise(
    one: TracedAttention, other: TracedAttention, cached: Trace, full: Trace, rows: int, news: int
) -> bool:
    """Whether the projections of an attention read other vectors although the first map of all read the same ones."""
    if not cached.linears or not full.linears:
        return False
    # the two calls ran on two copies, so that maps are paired by their path
    mine = [m for m in cached.linears if m.weight in one.maps]
    pairs = [(a, b) for a in mine for b in full.linears if b.weight in other.maps and a.path == b.path]
    entered = _differs_at_end(cached.linears[0].input, full.linears[0].input, rows, news)
    return entered is False and any(_differs_at_end(a.input, b.input, rows, news) for a, b in pairs)


def _differs_at_end(new: Tensor, whole: Tensor, rows: int, news: int) -> bool | None:
    """Whether the vectors of the new tokens differ; None where the layouts do not fit."""
    if new.shape[-1] != whole.shape[-1] or new.numel() != rows * news * new.shape[-1] or whole.numel() % rows:
        return None
    a, b = new.reshape(rows, news, -1), whole.reshape(rows, -1, whole.shape[-1])
    return _differs(a, b[:, -news:]) if b.shape[1] >= news else None


def _pairs(cached: list[TracedAttention], full: list[TracedAttention]) -> list[tuple[TracedAttention, TracedAttention]]:
    """The same attention in both calls: by its path and how often it was met there. An encoder runs in one of them."""
    left, found = list(full), []
    for one in cached:
        other = next((f for f in left if f.path == one.path), None)
        if other is not None:
            left.remove(other)
            found.append((one, other))
    return found


def _own(attentions: list[TracedAttention], rows: int, queries: int) -> list[TracedAttention]:
    """Attentions with as many queries as tokens were given."""
    found = []
    for one in attentions:
        scores = as_heads(one.scores, rows)
        if scores is not None and scores.shape[-2] == queries:
            found.append(one)
    return found


def vectors(one: TracedAttention, rows: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """q (B,H,T,K), k (B,G,S,K), v (B,G,S,U); G is H where keys are repeated for the heads that share them."""
    if one.v is None:
        return None
    q, k, v, scores = (as_heads(x, rows) for x in (one.q, one.k, one.v, one.scores))
    if q is None or k is None or v is None or scores is None:
        return None
    if k.shape[-2] == q.shape[-1] or k.shape[-2] != scores.shape[-1]:  # as the matmul reads it, (B,G,K,S)
        k = k.transpose(-1, -2)
    if q.shape[-2] != scores.shape[-2]:
        q = _grouped(one, q, k, scores)
    return None if q is None else (q, k, v)


def _grouped(one: TracedAttention, q: Tensor, k: Tensor, scores: Tensor) -> Tensor | None:
    """Queries of a group's heads lie in one matrix, (B,G,R·T,K): rows (r,t) or (t,r), whichever gives the scores.

    None where neither is clearly nearer to them: a matrix of that size may hold the queries of several sequences.
    """
    (b, heads, t, _), groups = scores.shape, q.shape[1]
    if groups != k.shape[1] or heads % groups or q.shape[2] != heads // groups * t:
        return None
    r, visible = heads // groups, ~hidden_keys(scores)
    orders = [q.reshape(b, groups, r, t, -1), q.reshape(b, groups, t, r, -1).transpose(2, 3)]

    def misfit(order: Tensor) -> float:
        product = (order @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * one.scale
        return float((product - scores)[visible].abs().mean())

    fits = [misfit(order) for order in orders]
    return orders[fits.index(min(fits))].flatten(1, 2) if min(fits) < 0.95 * max(fits) else None


def _differs(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or gap(a, b) > 1e-4 * max(rms(b), 1e-12)


def _part(
    one: TracedAttention, other: TracedAttention, rows: int, news: int, subject: Subject, source: int
) -> tuple[str, str] | None:
    """What differs between a cached attention and the same one of the full pass; None when nothing does."""
    mine, theirs = vectors(one, rows), vectors(other, rows)
    if mine is None or theirs is None:
        return None
    (q, k, v), (q2, k2, v2) = mine, theirs
    scores = as_heads(one.scores, rows)
    window, length = subject.facts.whole("window"), k2.shape[2]
    if scores is not None and k.shape[2] > length and bool(hidden_keys(scores)[..., length:].all()):
        k, v, scores = k[:, :, :length], v[:, :, :length], scores[..., :length]  # slots that are not filled yet
    if subject.kind == "seq2seq" and k2.shape[2] == source:
        return _source_part((q, k, v), (q2[:, :, -news:], k2, v2))
    if window is None and k.shape[2] < k2.shape[2]:  # a position counted from the cache is then wrong as well
        return "cache_mismatch", f"the attention reads {many(k.shape[2], 'key')} and should read {k2.shape[2]}"
    if _differs(q, q2[:, :, -news:]):
        if k.shape[2] == k2.shape[2] and _differs(v[:, :, -news:], v2[:, :, -news:]):
            return "decode_position", "the new token enters with another vector: its position embedding is another one"
        return "decode_position", "the new token's query is rotated to another position"
    scores2 = as_heads(other.scores, rows)
    assert scores is not None
    assert scores2 is not None
    scores2 = scores2[:, :, -news:]
    hidden, hidden2 = hidden_keys(scores), hidden_keys(scores2)
    visible, visible2 = int((~hidden).sum(-1).max()), int((~hidden2).sum(-1).max())
    if k.shape[2] != k2.shape[2]:
        if window is not None and visible != visible2 and k2.shape[2] >= window:
            return "window", f"{visible_keys(visible)}, {visible2} without a cache"
        if visible == visible2 and window is not None:
            return None  # a window's cache may forget keys that no query attends to
        if k.shape[2] > length and not bool(k[:, :, length:].any()):  # slots that are not filled yet are seen
            return "cache_mask", f"{visible_keys(visible)} of {k.shape[2]}, {visible2} without a cache"
        return "cache_mismatch", f"the attention reads {many(k.shape[2], 'key')} and should read {k2.shape[2]}"
    # the query is right, so the new token is: what is wrong with its key or value happened on the way into the cache
    if _differs(v[:, :, -news:], v2[:, :, -news:]):
        return "cache_mismatch", "the new token's value is not stored at its position"
    if _differs(k[:, :, -news:], k2[:, :, -news:]):
        turned = not _differs(k[:, :, -news:].norm(dim=-1), k2[:, :, -news:].norm(dim=-1))
        if turned and one.rotated[1]:
            return "decode_position", "the new token's key is rotated to another position"
        return "cache_mismatch", "the new token's key is not stored at its position"
    if _differs(v[:, :, :-news], v2[:, :, :-news]) or _differs(k[:, :, :-news], k2[:, :, :-news]):
        return "cache_mismatch", "keys or values of earlier tokens are not what they were"
    if not torch.equal(hidden, hidden2):
        if window is not None and k2.shape[2] > window and visible != visible2:
            return "window", f"{visible_keys(visible)}, {visible2} without a cache"
        return "cache_mask", f"{visible_keys(visible)} of {k.shape[2]}, {visible2} without a cache"
    if _differs(torch.where(hidden, 0.0, scores), torch.where(hidden2, 0.0, scores2)):
        return "decode_position", "the scores' position bias (ALiBi, relative) is that of other positions"
    return None


def _source_part(mine: tuple[Tensor, Tensor, Tensor], theirs: tuple[Tensor, Tensor, Tensor]) -> tuple[str, str] | None:
    """Over the source every key is old: only its keys and values can be wrong, or the query that reads them."""
    if _differs(mine[1], theirs[1]) or _differs(mine[2], theirs[2]):
        return "cache_mismatch", "keys or values of the source are not what they were"
    if _differs(mine[0], theirs[0]):
        return "cache_mismatch", "the query over the source is another one, though the layer's self-attention agrees"
    return None
