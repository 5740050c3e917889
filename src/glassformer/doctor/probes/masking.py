"""Padding is invisible: its content, its amount, its side, with a cache, in half precision."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace as change
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glassformer.anatomy.scores import hidden_keys
from glassformer.doctor.probes.attention import look
from glassformer.doctor.probes.padding import (
    NanToZero,
    Padded,
    amounts,
    conventions,
    feed_padded,
    pad_fill,
    padded,
)
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.isolate import HalfAsFloat
from glassformer.doctor.subject.measure import (
    CROSS_WHY,
    RELATIVE,
    SAME_WHY,
    SHIFT_BOUND,
    SHIFT_WHY,
    cross_shape_bound,
    gap,
    rms,
)
from glassformer.doctor.subject.rounding import Measured, judge, prefix_noise, untouched, worst
from glassformer.doctor.subject.subject import Subject
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict

AMOUNTS = [0, 3, 8]


def amounts_for(subject: Subject) -> list[int]:
    """Padding positions per row; a large model gets two rows, a short input less padding."""
    return amounts(subject, *AMOUNTS)[: subject.rows(3, 2)]


HALVES = (torch.bfloat16, torch.float16)
LEAK = (
    "Add the padding mask to the scores of every attention, before softmax, for the keys of each row: -inf at padding."
)
POSITION = (
    "Positions count real tokens: positions = (mask.cumsum(1) - 1).clamp(min=0), and go on from there with a cache."
)
OVERFLOW = "Find the first module whose output is not finite: softmax with every key masked, division by 0, overflow."
NAN = "A query with no visible key gives NaN, and 0·NaN spreads: let it see itself, or mask with a finite least number."
UNSUPPORTED = "left padding shifts this model's absolute positions, and it takes none from outside: pad on the right"
EMPTY = (
    "left padding leaves queries without a visible key, which get NaN, and it shifts this model's positions, which the "
    "caller cannot give: pad on the right"
)
FOREIGN = "left padding shifts this model's positions unless the caller passes position_ids: a convention, not a bug"


def nothing_is_nan(subject: Subject) -> Iterator[Finding]:
    """No NaN or infinity at real tokens: plain and left-padded, in the model's own precision, bfloat16 and float16."""

    def count(isolated: Subject, with_padding: bool) -> tuple[int, int]:
        """Of an input without padding, or padded on the left; then of one padded on the right."""
        length, counts = isolated.length(16, if_large=8), amounts_for(isolated)
        if not with_padding:
            return int((~torch.isfinite(isolated.logits(isolated.tokens(isolated.rows(2), length)))).sum()), 0
        bad = []
        for side in ("left", "right"):
            batch = padded(isolated, length, counts, side, pad_fill(isolated))
            logits = isolated.logits(batch.tokens, mask=batch.mask, **_places(isolated, batch))
            bad.append(sum(int((~torch.isfinite(batch.real(logits, b))).sum()) for b in range(len(counts))))
        return bad[0], bad[1]

    for dtype in (None, *HALVES):
        for with_padding in (False, True):
            if with_padding and subject.interface.mask is None:
                continue
            name = f"mask_nan/{str(dtype or subject.dtype).removeprefix('torch.')}{'-padded' if with_padding else ''}"
            name = "mask_nan/plain" if dtype is None and not with_padding else name
            if dtype is not None and subject.module is None:
                yield Finding.skip(name, "not a module, so it cannot be cast")
                continue
            try:
                with subject.isolated(dtype=dtype) as isolated, HalfAsFloat.where_slow(isolated):
                    bad, right = count(isolated, with_padding)
            except Exception as error:
                yield Finding.skip(name, f"it does not run so: {' '.join(str(error).split())[:100]}")
                continue
            if with_padding and bad and not right and not left_padding_is_meant(subject):
                yield Finding(name, Verdict.SKIP, bad, 0, EMPTY, "", {"explained": True})
                continue
            remedy = NAN if with_padding else OVERFLOW
            yield Finding.judge(name, bad + right, 0, "logits of real tokens are finite", remedy, dtype=str(dtype))


def left_padding_is_meant(subject: Subject) -> bool:
    """Whether left padding would change nothing if queries without a visible key read 0 in place of NaN.

    If it changes something nevertheless, the positions count the padding and the caller cannot give others: such a
    model is padded on the right, and NaN with left padding is no further bug.
    """
    if subject.interface.positions is not None or subject.facts.position_kind in RELATIVE:
        return True
    with contextlib.suppress(Exception), NanToZero():
        return judge(subject, "mask_nan", _amount("left"), NAN).passed
    return True


def _places(isolated: Subject, batch: Padded) -> dict[str, Any]:
    """Positions, where the library's convention is that the caller gives them."""
    wanted = isolated.interface.positions_from_caller and isolated.kind != "encoder"
    return {"positions": batch.positions} if wanted and batch.side == "left" else {}


def padding_constant(subject: Subject) -> Iterator[Finding]:
    """The score that hides a padding key: -inf or the least number, as for the future."""
    if subject.interface.mask is None:
        return
    with subject.isolated() as isolated:
        batch = padded(isolated, isolated.length(19), [3, 6], "left", pad_fill(isolated))
        trace = trace_call(isolated, batch.tokens, mask=batch.mask, **_places(isolated, batch))
        seen = look(isolated, trace, 2, batch.tokens.shape[1])
    for one in seen:
        if one.scores.shape[-1] != batch.mask.shape[1] or one.role == "cross":
            continue  # the source has its own mask
        real = batch.mask.to(one.scores.device)  # what was recorded is on the CPU
        padding = ~real[:, None, None, :] & real[:, None, :, None] & one.allowed
        values = one.scores[padding.expand_as(one.scores)]
        hidden = hidden_keys(one.scores)[padding.expand_as(one.scores)]
        least = float(values.max()) if values.numel() else -torch.inf
        if bool(hidden.all()) and least > one.mask_bound:
            why = f"padding keys get a score of {least:.4g}, which trained scores can fall below"
            evidence: dict[str, Any] = {"layer": one.layer, "value": least, "open": []}
            remedy = "Mask with -inf or torch.finfo(dtype).min."
            yield Finding("mask_value/padding", Verdict.FAIL, least, one.mask_bound, why, remedy, evidence)
            return


def padding_is_invisible(subject: Subject) -> Iterator[Finding]:
    """Content, then amount, left and right; source side of an encoder-decoder; then with a cache."""
    if subject.kind == "seq2seq" and subject.interface.source_mask is not None:
        yield from _source_padding(subject)
    if subject.interface.mask is None:
        if subject.interface.source_mask is None:
            yield Finding.skip("pad_leak/content", "the model takes no padding mask")
        return
    clean = True
    for side in ("left", "right"):
        for finding in _one_side(subject, side):
            # a left padding that is not supported without a cache is not with one either
            clean = clean and (
                finding.passed or (finding.id.startswith("left_pad") and finding.verdict is Verdict.SKIP)
            )
            yield finding
    if subject.has_cache and clean:
        yield from _with_cache(subject)


def _one_side(subject: Subject, side: str) -> Iterator[Finding]:
    content = judge(subject, f"pad_leak/content-{side}", _content(side), LEAK)
    if content.verdict is Verdict.FAIL and judge(subject, content.id, _content(side, ordinary=True), LEAK).passed:
        content = change(content, verdict=Verdict.SKIP, why=FOLLOW, remedy="", evidence={"explained": True})
    if content.verdict is Verdict.FAIL:
        content = _alone_or_together(subject, content, _content(side, together=False))
    yield content
    if content.verdict is Verdict.FAIL:
        return
    amount = judge(subject, f"pad_leak/amount-{side}", _amount(side), LEAK)
    if amount.verdict is Verdict.FAIL and amount.measured == torch.inf:  # NaN in the padded batch, a number without it
        if side == "left" and not left_padding_is_meant(subject):
            evidence = {**amount.evidence, "explained": True}
            yield change(amount, id="mask_nan/padded-left", verdict=Verdict.SKIP, why=EMPTY, evidence=evidence)
            return
        why = "logits of real tokens are NaN or infinite in a padded batch, and finite without padding"
        yield change(
            amount, id=f"mask_nan/padded-{side}", why=why, remedy=NAN, evidence={**amount.evidence, "cause": why}
        )
        return
    if amount.verdict is Verdict.FAIL:
        amount = _alone_or_together(subject, amount, _amount(side, together=False))
    if amount.verdict is Verdict.FAIL and side == "left" and amount.id.startswith("pad_leak"):
        amount = _left_amount(subject, amount)
    yield amount
    if amount.verdict is Verdict.PASS and side == "left" and _places_wanted(subject):
        with subject.isolated(subject.warmth) as isolated:  # a convention, noted and not judged: one look is enough
            plain = _amount(side, positions=False)(isolated)
        if plain.ratio > 1:
            evidence, id = {**plain.evidence, "explained": True}, "left_pad_position/without-positions"
            yield Finding(id, Verdict.SKIP, plain.gap, plain.bound, FOREIGN, "", evidence)


def _alone_or_together(subject: Subject, finding: Finding, alone: Callable[[Subject], Measured]) -> Finding:
    """Padding that is only seen in a batch of rows is the rows' affair, not the mask's."""
    if not judge(subject, finding.id, alone, LEAK).passed:
        return finding
    words = "a padded row alone is right, in a batch with others it is not: the rows share a mask"
    remedy = "Give each row of the batch its own mask: (B,1,1,S), not the first row's."
    return change(finding, id="batch_variance/padded-rows", why=words, remedy=remedy)


def _places_wanted(subject: Subject) -> bool:
    return subject.interface.positions_from_caller and subject.kind != "encoder"


def _content(side: str, together: bool = True, ordinary: bool = False) -> Callable[[Subject], Measured]:
    def measure(isolated: Subject) -> Measured:
        several = amounts_for(isolated)
        batches = [several] if together else [[amount] for amount in several[1:]]
        return worst([_content_of(isolated, each, side, ordinary) for each in batches])

    return measure


def _content_of(isolated: Subject, counts: list[int], side: str, ordinary: bool = False) -> Measured:
    """Other ids in the padding: compared with the padding id, or with `ordinary` ids, none of which is special."""
    fill = None if ordinary else pad_fill(isolated)
    one = padded(isolated, isolated.length(19, if_large=12), counts, side, fill)
    base, found = isolated.logits(one.tokens, mask=one.mask, **_places(isolated, one)), []
    for seed in (0, 1):
        two = one.tokens.clone()
        two[~one.mask] = isolated.other(one.tokens, seed=40 + seed)[~one.mask]
        moved = isolated.logits(two, mask=one.mask, **_places(isolated, one))
        rows = [b for b, amount in enumerate(counts) if amount]
        found += [untouched(one.real(base, b), one.real(moved, b), SAME_WHY, row=b, side=side) for b in rows]
    return worst(found)


def _amount(
    side: str, positions: bool = True, explicit: bool = False, together: bool = True
) -> Callable[[Subject], Measured]:
    def measure(isolated: Subject) -> Measured:
        several = amounts_for(isolated)
        batches = [several] if together else [[amount] for amount in several]
        return worst([_amount_of(isolated, each, side, positions, explicit) for each in batches])

    return measure


def _amount_of(isolated: Subject, counts: list[int], side: str, positions: bool, explicit: bool) -> Measured:
    """Each row of a padded batch against the row alone, without padding."""
    batch = padded(isolated, isolated.length(19, if_large=12), counts, side, pad_fill(isolated))
    given = {"positions": batch.positions} if explicit else _places(isolated, batch) if positions else {}
    logits = isolated.logits(batch.tokens, mask=batch.mask, **given)
    found = []
    for b, row in enumerate(batch.rows):
        source = _row_source(isolated, b, len(batch.rows))
        alone = isolated.logits(row, **source, **_counted(row, bool(given)))
        noise = prefix_noise(isolated, row, None if given else alone, **source)  # prefixes are placed by the model
        bound, why = cross_shape_bound(alone, noise), CROSS_WHY
        if side == "left" and counts[b] and not given:
            # it may stand at other positions than alone: no difference in relative schemes, but for rounded tables
            bound, why = max(bound, SHIFT_BOUND * rms(alone)), SHIFT_WHY
        evidence = {"row": b, "padding": counts[b], "side": side}
        found.append(Measured(gap(batch.real(logits, b), alone), bound, why, evidence))
    return worst(found)


def _counted(row: Tensor, explicit: bool) -> dict[str, Any]:
    """Positions of a row alone, where the padded one is given its own: a model may count from elsewhere than 0."""
    return {"positions": torch.arange(row.shape[1], device=row.device)[None]} if explicit else {}


def _row_source(isolated: Subject, row: int, rows: int) -> dict[str, Any]:
    """An encoder-decoder's row keeps its own source when it is looked at alone."""
    return {"source": isolated.source(rows)[row : row + 1]} if isolated.kind == "seq2seq" else {}


def _left_amount(subject: Subject, finding: Finding) -> Finding:
    """Content is silent and amount is not: positions, or something else?"""
    relative = subject.facts.position_kind in RELATIVE
    explained = {**finding.evidence, "explained": True}
    if subject.kind == "encoder":
        return change(finding, verdict=Verdict.SKIP, why=UNSUPPORTED, remedy="", evidence=explained)
    if subject.interface.positions is None:
        if relative:
            return change(finding, id="left_pad_position/amount", remedy=POSITION)
        return change(finding, verdict=Verdict.SKIP, why=UNSUPPORTED, remedy="", evidence=explained)
    with_positions = judge(subject, finding.id, _amount("left", explicit=True), LEAK)
    if with_positions.passed:
        words = "content of the padding is silent, its amount is not, and with explicit positions it is silent too"
        return change(
            finding, id="left_pad_position/amount", remedy=POSITION, evidence={**finding.evidence, "cause": words}
        )
    return finding


FOLLOW = (
    "only the padding id itself matters in padding positions, any other ids there give the same: positions (or a mask) "
    "are derived from the padding id"
)


def _source_padding(subject: Subject) -> Iterator[Finding]:
    def batches(isolated: Subject, side: str, ordinary: bool = False) -> tuple[Padded, Tensor]:
        fill = None if ordinary else pad_fill(isolated)
        return padded(isolated, 11, [0, 2, 5], side, fill), isolated.tokens(3, isolated.length(9), seed=31)

    for side in ("right", "left"):

        def content(isolated: Subject, side: str = side, ordinary: bool = False) -> Measured:
            source, target = batches(isolated, side, ordinary)
            junk = source.tokens.clone()
            junk[~source.mask] = isolated.other(source.tokens)[~source.mask]
            a = isolated.logits(target, source=source.tokens, source_mask=source.mask)
            b = isolated.logits(target, source=junk, source_mask=source.mask)
            return untouched(a, b, SAME_WHY, side=side, where="source")

        def amount(isolated: Subject, side: str = side) -> Measured:
            source, target = batches(isolated, side)
            together = isolated.logits(target, source=source.tokens, source_mask=source.mask)
            found = []
            for b, row in enumerate(source.rows):
                alone = isolated.logits(target[b : b + 1], source=row)
                noise = prefix_noise(isolated, target[b : b + 1], alone, source=row)
                bound = cross_shape_bound(alone, noise)
                found.append(Measured(gap(together[b : b + 1], alone), bound, CROSS_WHY, {"row": b, "where": "source"}))
            return worst(found)

        first = judge(subject, f"pad_leak/source-content-{side}", content, LEAK)
        if first.verdict is Verdict.FAIL and judge(subject, first.id, partial(content, ordinary=True), LEAK).passed:
            first = change(first, verdict=Verdict.SKIP, why=FOLLOW, remedy="", evidence={"explained": True})
        yield first
        if first.verdict is Verdict.FAIL:
            return
        second = judge(subject, f"pad_leak/source-amount-{side}", amount, LEAK)
        if second.verdict is Verdict.FAIL and side == "left":
            second = change(
                second, verdict=Verdict.SKIP, why=UNSUPPORTED, evidence={**second.evidence, "explained": True}
            )
        yield second


def _with_cache(subject: Subject) -> Iterator[Finding]:
    """A left-padded prompt, then cached steps, against each row alone without padding or cache."""
    explicit = _places_wanted(subject)
    ways = conventions(subject)
    if subject.limit < 8:
        yield Finding.skip("pad_leak/with-cache", f"inputs of at most {subject.limit} tokens are too short for it")
        return

    def measure(isolated: Subject, way: str, fill: int | None = 0) -> Measured:
        counts = amounts_for(isolated)
        length = min(13, isolated.limit - 4)
        batch = padded(isolated, length, counts, "left", pad_fill(isolated) if fill == 0 else fill)
        more = isolated.tokens(len(counts), 4, seed=55)
        steps, _ = feed_padded(isolated, batch, more, way, explicit)
        found = []
        for b, row in enumerate(batch.rows):
            whole = torch.cat([row, more[b : b + 1]], dim=1)
            source = _row_source(isolated, b, len(counts))
            alone = isolated.logits(whole, **source, **_counted(whole, explicit))
            noise = prefix_noise(isolated, whole, None if explicit else alone, **source)
            evidence = {"row": b, "padding": counts[b], "cache": way}
            found.append(
                Measured(gap(steps[b : b + 1], alone[:, -4:]), cross_shape_bound(alone, noise), CROSS_WHY, evidence)
            )
        return worst(found)

    tried: list[Finding] = []
    for way in ways:
        try:
            finding = judge(subject, "pad_leak/with-cache", partial(measure, way=way), LEAK)
        except Unsupported:
            raise
        except Exception:  # this model takes the padding mask in another way
            continue
        if finding.passed:
            yield finding
            return
        tried.append(finding)
    if not tried:
        yield Finding.skip("pad_leak/with-cache", "a padded prompt followed by cached steps does not run")
        return
    yield _cached_cause(subject, min(tried, key=lambda f: f.measured or 0.0), measure)


def _cached_cause(subject: Subject, finding: Finding, measure: Callable[..., Measured]) -> Finding:
    """Content silent and amount not: the positions go on wrongly; else padding is seen."""
    way = finding.evidence["cache"]
    kind = subject.facts.position_kind
    if kind == "none" or (subject.kind != "seq2seq" and finding.evidence.get("padding") == 0):
        return finding
    with subject.isolated() as isolated:
        more = isolated.tokens(len(amounts_for(isolated)), 4, seed=55)
        ends = []
        for fill in (pad_fill(isolated), None):
            batch = padded(isolated, min(13, isolated.limit - 4), amounts_for(isolated), "left", fill)
            ends.append(feed_padded(isolated, batch, more, way, _places_wanted(subject))[0])
    if gap(ends[0], ends[1]) <= untouched(ends[0], ends[0], "").bound:
        words = "after a left-padded prompt the content of the padding is silent, its amount is not"
        return change(
            finding, id="left_pad_position/with-cache", remedy=POSITION, evidence={**finding.evidence, "cause": words}
        )
    return finding
