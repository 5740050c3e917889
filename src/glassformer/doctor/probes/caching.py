"""A cache changes the cost and nothing else: prompt, steps, chunks, rollback and reordering against one full pass."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace as change
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.probes.padding import amounts, conventions, pad_fill, padded, step_padded
from glassformer.doctor.probes.step import explain_step
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.measure import CROSS_WHY, cross_shape_bound, gap
from glassformer.doctor.subject.rounding import Measured, first_over, judge, prefix_noise
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

CROPS = ("crop", "truncate", "trim", "rollback", "rewind")
REORDERS = ("reorder", "reorder_cache", "index_select", "permute_rows")
NO_CACHE = "the model takes no cache"


def run_chunks(
    isolated: Subject, tokens: Tensor, sizes: list[int], explicit: bool = False, cache: Any = None, **given: Any
) -> tuple[Tensor, Any]:
    """Feed tokens through a cache in pieces; `explicit` gives the positions too."""
    start = 0 if cache is None else given.pop("start", 0)
    cache = isolated.new_cache(len(tokens)) if cache is None else cache
    pieces = []
    for size in sizes:
        piece = tokens[:, start : start + size]
        if not piece.shape[1]:
            break
        extra = dict(given)
        if explicit:
            positions = torch.arange(start, start + piece.shape[1], device=tokens.device)
            extra["positions"] = positions.expand(len(tokens), -1)
        logits, cache = isolated.call(piece, cache=cache, with_cache=True, **extra)
        if cache is None:
            raise Unsupported("a call with a cache gives no cache back")
        pieces.append(logits)
        start += piece.shape[1]
    return torch.cat(pieces, dim=1), cache


def plans(subject: Subject) -> list[tuple[str, int, list[int]]]:
    """(what, rows, pieces): each plan is one way to feed a sequence."""
    limit, small = subject.limit, not subject.large
    short = min(24, limit)
    if not small:
        few = [("steps", 3, [3] + [1] * 9), ("chunks", 2, [4, 2, 5, 7])]
        return [*few, ("steps", 1, [60] + [1] * 6)] if limit > 66 else few
    found = [("steps", 3, [3] + [1] * (short - 3)), ("steps", 1, [1] * min(12, limit))]
    for prompt in (60, 124):
        if prompt + 4 <= limit and (small or prompt == 60):
            found.append(("steps", 1 if prompt == 60 else 2, [prompt] + [1] * min(8, limit - prompt)))
    window = subject.facts.whole("window")
    if window is not None and 2 * window + 3 <= limit and 2 * window + 3 > short:
        found.append(("steps", 2, [3] + [1] * (2 * window)))
    found.append(("chunks", 3, [4, 2, 5, 7, max(1, short - 18)]))
    found.append(("chunks", 1, [2, 5, 2, 7, 1, max(1, short - 17)]))
    if limit >= 72:  # histories on both sides of 64, the last one well past it
        found.append(("chunks", 1, [60, 5, 7, 9] if limit >= 81 else [60, 5, 7]))
    if window is not None and window + 12 <= limit:
        found.append(("chunks", 2, [window, 2, 5, 5]))
    return found


def against_full(isolated: Subject, rows: int, sizes: list[int], explicit: bool = False) -> Measured:
    """Logits through a cache against one plain pass; the evidence names the first position that is off."""
    tokens = isolated.tokens(rows, min(sum(sizes), isolated.limit), seed=sum(sizes) + rows)
    full = isolated.logits(tokens)
    cached, _ = run_chunks(isolated, tokens, sizes, explicit)
    bound = cross_shape_bound(full, prefix_noise(isolated, tokens, full))
    off = (cached.double() - full.double()).abs().nan_to_num(nan=torch.inf).amax(dim=2)
    bad = (off > bound).nonzero()
    first = int(bad[:, 1].min()) if len(bad) else None
    ends = torch.tensor(sizes).cumsum(0).tolist()
    evidence: dict[str, Any] = {"rows": rows, "pieces": sizes, "first_bad": first}
    if first is not None:
        evidence["piece"] = next(i for i, end in enumerate(ends) if first < end)
        evidence["bad_rows"] = sorted({int(r) for r in bad[:, 0]})
    return Measured(gap(cached, full), bound, CROSS_WHY, evidence)


def cache_equals_recomputation(subject: Subject) -> Iterator[Finding]:
    """Prompt, steps, chunks. The findings distinguish position, mask, window and the cache itself."""
    if not subject.has_cache:
        yield Finding.skip("cache_mismatch/steps", NO_CACHE)
        return
    finding = _or_crash(subject, "cache_mask/prompt", _prompt, PROMPT_REMEDY)
    if finding.verdict is Verdict.FAIL:
        yield finding if "crash" in finding.evidence else _prompt_cause(subject, finding)
        return
    yield finding
    by_kind: dict[str, list[tuple[int, list[int]]]] = {}
    for what, rows, sizes in plans(subject):
        by_kind.setdefault(what, []).append((rows, sizes))
    finding = _or_crash(subject, "cache_mismatch/steps", _several(by_kind["steps"]), STEP_REMEDY)
    if finding.verdict is Verdict.FAIL:
        yield finding if "crash" in finding.evidence else explained(subject, finding)
        return
    yield finding
    finding = _or_crash(subject, "cache_mask/chunks", _several(by_kind["chunks"]), CHUNK_REMEDY)
    if "crash" in finding.evidence:
        pass
    elif finding.verdict is Verdict.FAIL and _vanishes(subject, finding):
        finding = change(finding, id="decode_position/chunks", remedy=POSITION_REMEDY)
    elif finding.verdict is Verdict.FAIL:
        finding = explained(subject, finding, otherwise="cache_mask")
    yield finding


def _or_crash(subject: Subject, id: str, measure: Callable[[Subject], Measured], remedy: str) -> Finding:
    """A shape that does not fit, in a call with the model's own cache, is a failure of that call."""
    try:
        return judge(subject, id, measure, remedy)
    except RuntimeError as error:
        if not _has_own_cache(subject) or not any(
            word in str(error) for word in ("size", "shape", "dimension", "match")
        ):
            raise
        text = " ".join(str(error).split())[:120]
        why = f"a call with a cache stops with: {text}"
        return Finding(id, Verdict.FAIL, torch.inf, 0.0, why, remedy, {"crash": text})


def _has_own_cache(subject: Subject) -> bool:
    """Whether the cache comes from the model. A (B,T,D) tensor next to the logits may be the hidden states instead."""
    if subject.interface.maker is not None:
        return True
    with subject.isolated() as isolated:
        _, cache = isolated.call(isolated.tokens(1, 2), with_cache=True)
    return cache is not None and not (isinstance(cache, Tensor) and cache.dim() < 4)


PROMPT_REMEDY = (
    "The prompt pass has a cache too: apply the causal mask there, key index <= query index + cached length."
)
STEP_REMEDY = (
    "Store each new token's keys and values after those already there, in every layer, in the model's precision."
)
CHUNK_REMEDY = (
    "Several tokens after a cached prefix: mask by key index <= query index + cached length, not a square triangle."
)
POSITION_REMEDY = "Positions of cached tokens continue at the cache's length: arange(len(cache), len(cache) + T)."


def _prompt(isolated: Subject) -> Measured:
    length = isolated.length(24)
    return first_over([against_full(isolated, rows, [length]) for rows in (1, isolated.rows(3, 2))])


def _prompt_cause(subject: Subject, finding: Finding) -> Finding:
    if _vanishes(subject, finding):
        return change(finding, id="decode_position/prompt", remedy=POSITION_REMEDY)
    cause, words, layer = explain_step(subject, **_scene(subject, finding))
    if cause in ("decode_position", "window", "cache_mismatch"):
        return change(finding, id=f"{cause}/prompt", evidence={**finding.evidence, "cause": words, "layer": layer})
    if cause is None and _same_in_steps(subject, finding):
        singly = {"pieces": [1] * sum(finding.evidence["pieces"]), "piece": finding.evidence["first_bad"]}
        return explained(subject, change(finding, remedy=STEP_REMEDY, evidence={**finding.evidence, **singly}))
    return change(finding, evidence={**finding.evidence, "cause": words, "layer": layer})


def _same_in_steps(subject: Subject, finding: Finding) -> bool:
    """Whether a prompt gives the same wrong logits token by token: then no mask among its tokens is the cause."""
    rows, sizes = finding.evidence["rows"], finding.evidence["pieces"]
    try:
        with subject.isolated(_factor(finding)) as isolated:
            tokens = isolated.tokens(rows, sum(sizes), seed=sum(sizes) + rows)
            together, _ = run_chunks(isolated, tokens, sizes)
            singly, _ = run_chunks(isolated, tokens, [1] * sum(sizes))
            return finding.bound is not None and gap(singly, together) <= finding.bound
    except Exception:  # single tokens may not be possible
        return False


def _several(cases: list[tuple[int, list[int]]]) -> Callable[[Subject], Measured]:
    def measure(isolated: Subject) -> Measured:
        return first_over([against_full(isolated, rows, sizes) for rows, sizes in cases])

    return measure


def _factor(finding: Finding) -> float:
    weights = str(finding.evidence.get("weights", "as given"))
    return float(weights.split("x ")[1]) if "x " in weights else 1.0


def _vanishes(subject: Subject, finding: Finding) -> bool:
    """Whether the gap goes away when the positions are given."""
    if subject.interface.positions is None:
        return False
    rows, sizes = finding.evidence["rows"], finding.evidence["pieces"]
    try:
        with subject.isolated(_factor(finding)) as isolated:
            return against_full(isolated, rows, sizes, explicit=True).ratio <= 1
    except Exception:
        return False


def _scene(subject: Subject, finding: Finding) -> dict[str, Any]:
    rows, sizes, first = (finding.evidence[k] for k in ("rows", "pieces", "first_bad"))
    return {
        "rows": rows,
        "sizes": sizes,
        "piece": finding.evidence.get("piece", 0),
        "warm": _factor(finding),
        "first": first,
    }


def explained(subject: Subject, finding: Finding, otherwise: str = "cache_mismatch") -> Finding:
    """Name the cause of a failed step by the second experiments: explicit positions, then the trace of the step."""
    first, window = finding.evidence["first_bad"], subject.facts.whole("window")
    how = f"position {first} is the first that differs"
    if _vanishes(subject, finding):
        evidence = {**finding.evidence, "cause": how + "; with explicit positions they all agree"}
        return change(finding, id="decode_position/steps", remedy=POSITION_REMEDY, evidence=evidence)
    cause, words, layer = explain_step(subject, **_scene(subject, finding))
    if cause is None:
        cause = otherwise
        if window is not None and abs(first - window) <= 1:
            cause, words = "window", f"the first bad position, {first}, is the window"
    if otherwise == "cache_mask" and cause not in ("decode_position", "cache_mismatch"):
        cause = otherwise  # single steps agree: what several tokens need beyond that is the mask among them
    remedy = {"decode_position": POSITION_REMEDY, "cache_mask": CHUNK_REMEDY, "window": WINDOW_REMEDY}.get(
        cause, finding.remedy
    )
    evidence = {**finding.evidence, "cause": f"{how}; {words}" if words else how, "layer": layer}
    return change(finding, id=f"{cause}/{finding.id.split('/')[1]}", remedy=remedy, evidence=evidence)


WINDOW_REMEDY = (
    "With a cache, too, let query i see key j when 0 <= i - j < window, i and j counted over the whole sequence."
)


def roll_back(cache: Any, length: int, dropped: int) -> Any:
    """Crop to `length`; a cache of transformers takes how many to drop, as a negative number."""
    foreign = type(cache).__module__.startswith("transformers.")
    name = next((n for n in CROPS if callable(getattr(cache, n, None))), None)
    if name is None:
        raise Unsupported("its cache has no crop")
    method = getattr(cache, name)
    try:
        returned = method(-dropped if foreign else length)
    except Exception as error:
        raise Unsupported(f"its cache refuses to be cropped here ({' '.join(str(error).split())[:80]})") from None
    return cache if returned is None or isinstance(returned, bool | int) else returned


def rollback(subject: Subject) -> Finding:
    """n tokens, k others, crop(n), go on: the same as if the others had never been."""
    id = "cache_rollback/crop"
    if not subject.has_cache:
        return Finding.skip(id, NO_CACHE)

    def once(isolated: Subject, rows: int, kept: list[int], junk: list[int]) -> Measured:
        n, k = sum(kept), sum(junk)
        tokens = isolated.tokens(rows, n + 5, seed=n)
        full = isolated.logits(tokens)
        _, cache = run_chunks(isolated, tokens, kept)
        wrong = isolated.other(tokens.repeat(1, 3))[:, : n + k]
        _, cache = run_chunks(isolated, wrong, junk, cache=cache, start=n)
        cache = roll_back(cache, n, k)
        cached, _ = run_chunks(isolated, tokens, [1, 1, 3], cache=cache, start=n)
        bound = cross_shape_bound(full, prefix_noise(isolated, tokens, full))
        return Measured(gap(cached, full[:, n:]), bound, CROSS_WHY, {"kept": n, "dropped": k, "rows": rows})

    def measure(isolated: Subject) -> Measured:
        cases = [(2, [9], [5]), (3, [4, 1, 1, 1], [1, 1]), (1, [7], [1])][: 1 if isolated.large else 3]
        fitting = [case for case in cases if sum(case[1]) + 8 < isolated.limit] or [(2, [2], [2])]
        if isolated.limit < 7:
            raise Unsupported(f"inputs of at most {isolated.limit} tokens are too short to drop some of them")
        return first_over([once(isolated, *case) for case in fitting])

    remedy = (
        "After crop(n) something still remembers the dropped tokens: keys, values, padding, or the position counter."
    )
    return judge(subject, id, measure, remedy)


def permute_rows(cache: Any, rows: Tensor) -> Any:
    """Row i becomes what row rows[i] was."""
    name = next((n for n in REORDERS if callable(getattr(cache, n, None))), None)
    if name is None:
        raise Unsupported("its cache has no reorder")
    returned = getattr(cache, name)(rows)
    return cache if returned is None or isinstance(returned, bool | int) else returned


def reorder(subject: Subject) -> Iterator[Finding]:
    """Permute the rows mid-way: every part of the state must follow."""
    if not subject.has_cache:
        yield Finding.skip("cache_reorder/rows", NO_CACHE)
        return
    remedy = "Not every part of the state was permuted: keys, values, padding mask, positions, encoder output."

    def measure(isolated: Subject) -> Measured:
        rows = torch.tensor([2, 0, 1], device=isolated.device)
        n, found = min(6, isolated.limit - 5), []
        if n < 1:
            raise Unsupported(f"inputs of at most {isolated.limit} tokens are too short to reorder them midway")
        for order in (rows,) if isolated.large else (rows, torch.tensor([1, 1, 0], device=isolated.device)):
            tokens = isolated.tokens(3, n + 5, seed=8)
            tokens[:, n:] = isolated.tokens(3, 5, seed=9)
            sequence = torch.cat([tokens[order][:, :n], tokens[:, n:]], dim=1)
            source: dict[str, Any] = {"source": isolated.source(3)} if isolated.kind == "seq2seq" else {}
            after = {name: value[order] for name, value in source.items()}
            full = isolated.logits(sequence, **after)
            _, cache = run_chunks(isolated, tokens, [n], **source)
            cached, _ = run_chunks(isolated, sequence, [1, 1, 3], cache=permute_rows(cache, order), start=n, **after)
            bound = cross_shape_bound(full, prefix_noise(isolated, sequence, full, **after))
            found.append(Measured(gap(cached, full[:, n:]), bound, CROSS_WHY, {"order": order.tolist()}))
        return first_over(found)

    rows = judge(subject, "cache_reorder/rows", measure, remedy)
    yield rows
    padded_too = subject.interface.mask is not None and not subject.interface.library and not subject.large
    if rows.passed and padded_too:
        finding = _reorder_padded(subject, remedy)
        if finding is not None:
            yield finding


def _reorder_padded(subject: Subject, remedy: str) -> Finding | None:
    """The same with different left padding per row, where padded prompts and cached steps work at all."""
    order = torch.tensor([2, 0, 1], device=subject.device)

    def measure(isolated: Subject, way: str, permute: bool) -> Measured:
        length = min(12, isolated.limit - 3)
        batch = padded(isolated, length, amounts(isolated, 0, 3, 6), "left", pad_fill(isolated))
        more = isolated.tokens(3, 3, seed=56)
        where = order if permute else torch.arange(3, device=order.device)
        sources = isolated.source(3) if isolated.kind == "seq2seq" else None
        given = {} if sources is None else {"source": sources}
        _, cache = isolated.call(
            batch.tokens, mask=batch.mask, cache=isolated.new_cache(len(batch.tokens)), with_cache=True, **given
        )
        cache = permute_rows(cache, order) if permute else cache
        steps, _ = step_padded(isolated, cache, batch.mask[where], more, way, False)
        worst = Measured(0.0, 1.0, CROSS_WHY)
        for b, row in enumerate(int(r) for r in where):
            whole = torch.cat([batch.rows[row], more[b : b + 1]], dim=1)
            alone = {} if sources is None else {"source": sources[row : row + 1]}
            full = isolated.logits(whole, **alone)
            bound = cross_shape_bound(full, prefix_noise(isolated, whole, full, **alone))
            found = Measured(gap(steps[b : b + 1], full[:, -3:]), bound, CROSS_WHY, {"row": row, "padded": True})
            worst = max(worst, found, key=lambda m: m.ratio)
        return worst

    for way in conventions(subject):
        with contextlib.suppress(Exception):
            # only where the padded steps are right without a permutation does a permutation say anything
            if judge(subject, "cache_reorder/padded", partial(measure, way=way, permute=False), remedy).passed:
                return judge(subject, "cache_reorder/padded", partial(measure, way=way, permute=True), remedy)
    return None
