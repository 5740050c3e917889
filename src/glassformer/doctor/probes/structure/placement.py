"""Where the norms are, read from the graph: for models whose blocks are no modules that `blocks.wiring` could watch.

Pre-norm: attention and feed-forward read a norm of the residual stream. Post-norm: they read the stream itself, and the
sum is normed. Assumption: a placement is declared, and attention's input and residual connection were both found.
"""

from collections.abc import Iterator

import torch

from glassformer.anatomy.fits import distance
from glassformer.doctor.probes import blocks
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.doctor.subject.measure import many
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

ID, GROWTH, START = "norm_placement/read", "residual_growth/traced", "norm_placement/start"
SAME = 1e-9
"""Relative, in float64: what attention reads is the stream itself."""


ALONG = 0.5
"""Mean cosine between a stream and a norm of it, token by token; that of unrelated vectors is near 0."""


def as_declared(subject: Subject) -> Iterator[Finding]:
    """Attention reads a norm of the stream where pre-norm is declared, the stream itself where post-norm is."""
    placement = blocks._declared_placement(subject)
    if placement not in ("pre", "post"):
        yield Finding.skip(ID, "neither pre-norm nor post-norm is declared")
        return
    if any(f.verdict is not Verdict.SKIP for f in blocks.wiring(subject)):
        return  # the blocks are modules, and were watched
    anatomy = recorded(subject, exact=True).anatomy
    seen = 0
    for layer, block in enumerate(anatomy.blocks):
        q = block.attention.projections.get("q")
        if q is None or block.entering is None or block.attention.cross or q.read.shape != block.entering.shape:
            continue
        seen += 1
        reads_stream = distance(q.read, block.entering) < SAME
        if reads_stream == (placement == "post"):
            continue
        if placement == "pre":
            why = f"attention of layer {layer} reads the residual stream itself, not a norm of it; pre-norm is declared"
            remedy = "Norm what each part reads: x = x + f(norm(x))."
        else:
            why = f"attention of layer {layer} reads something other than the residual stream; post-norm is declared"
            remedy = "Norm the sums: x = norm(x + f(x))."
        yield Finding(ID, Verdict.FAIL, None, None, why, remedy, {"layer": layer})
        return
    if not seen:
        yield Finding.skip(ID, "the input and the residual connection of attention were not found")
    else:
        yield Finding(ID, Verdict.PASS, why=f"attention reads what {placement}-norm gives it, in {seen} layers")


def residual_not_normed(subject: Subject) -> Iterator[Finding]:
    """Attention and feed-forward of a layer agree on what they are added to, whatever is declared.

    In post-norm layers both are added to what they read, in pre-norm layers neither is. Where one is and the other is
    not, a residual connection starts from the normed stream. The first layer may read a stream that is normed already.
    """
    if subject.module is None or subject.interface.library or blocks._weighs_the_stream(subject):
        return
    judged = []
    for layer, block in enumerate(recorded(subject, exact=True).anatomy.blocks):
        q, feed, merged = block.attention.projections.get("q"), block.feed, block.attention.merged
        tensors = (block.entering, block.joined, block.leaving)
        if q is None or feed is None or merged is None or not feed.dense or any(t is None for t in tensors):
            continue
        entering, joined, leaving = (t for t in tensors if t is not None)
        read, down = feed.first[0].read, feed.down.out
        if len({t.shape for t in (q.read, entering, merged.out, joined, leaving, read, down)}) > 1:
            continue
        if block.attention.cross or distance(joined, entering + merged.out) >= SAME:
            continue  # the sum after attention was not located
        attention = distance(q.read, entering) < SAME
        if not attention and float(torch.cosine_similarity(q.read, entering, dim=-1).mean()) < ALONG:
            continue  # in another order, or something other than a norm of the stream
        from_read, from_stream = (distance(leaving, start + down) < SAME for start in (read, joined))
        if from_read != from_stream:
            judged.append((layer, attention, from_read))
    mixed = [(layer, attention) for layer, attention, feed_ in judged if attention != feed_]
    if len(mixed) > 1 or any(layer > 0 for layer, _ in mixed):
        layer, attention = mixed[-1]
        what, other = ("attention", "the feed-forward") if attention else ("the feed-forward", "attention")
        why = f"layer {layer}: {what} is added to the normed stream that it reads, {other} to the stream itself"
        yield Finding(START, Verdict.FAIL, None, None, why, "x = x + f(norm(x)): add to x itself.", {"layer": layer})
    elif judged:
        yield Finding(START, Verdict.PASS, why=f"attention and feed-forward are wired alike in {len(judged)} layers")


def stream_added_once(subject: Subject) -> Iterator[Finding]:
    """Each sum is the stream once and what its part gave. A factor that the model keeps or declares is by design."""
    assert subject.module is not None
    if any(f.verdict is not Verdict.SKIP for f in blocks.wiring(subject)) or blocks._residual_factors(subject):
        return
    kept, seen = blocks._numbers(subject.module), 0
    for layer, block in enumerate(recorded(subject, exact=True).anatomy.blocks):
        attention, feed = block.attention.merged, block.feed
        down = feed.down if feed is not None and feed.dense else None
        sums = [
            ("attention", block.joined, block.entering, attention),
            ("feed-forward", block.leaving, block.joined, down),
        ]
        for what, after, before, part in sums:
            if after is None or before is None or part is None or not after.shape == before.shape == part.out.shape:
                continue
            (stream, _), left = blocks.fit(after, [before, part.out])
            if left > blocks.FIT:
                continue
            seen += 1
            if abs(stream - 1) > 1e-2 and not blocks._is_kept(stream, kept):
                why = f"layer {layer}: the stream enters the sum after {what} {stream:.3g} times, not once"
                remedy = "Add each part to the stream once: x = x + f(norm(x))."
                yield Finding(GROWTH, Verdict.FAIL, stream, 1.0, why, remedy, {"layer": layer, "part": "the stream"})
                return
    if seen:
        yield Finding(GROWTH, Verdict.PASS, why=f"the stream enters each of {many(seen, 'sum')} once")


PROBES = (("placement", as_declared), ("residual", residual_not_normed), ("stream", stream_added_once))
