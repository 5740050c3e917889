"""The loss a model reports: which target each logit is compared with, and which targets count."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.doctor.probes.padding import amounts, pad_fill, padded
from glassformer.doctor.subject import interface as calls
from glassformer.doctor.subject.errors import CannotExamineError, Unsupported
from glassformer.doctor.subject.loss import LossCall, loss_call
from glassformer.doctor.subject.measure import ulp
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

IGNORE = -100
MATCH = 1e-2
"""Relative gradient difference below which two losses are the same one; wrong targets leave about √2."""
SHIFT_REMEDY = (
    "Compare logits[:, :-1] with tokens[:, 1:], once: the caller or the model shifts, not both, rows kept apart."
)
PAD_REMEDY = (
    "Sum over counted targets and divide by their number: -100 at padding, ignore_index=-100, one mean over the batch."
)


def own_loss(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    """Mean cross-entropy of logits at t against labels at t + shift."""
    size = logits.shape[1]
    a = logits[:, max(0, -shift) : size - max(0, shift)]
    b = labels[:, max(0, shift) : size - max(0, -shift)]
    return F.cross_entropy(a.flatten(0, 1).float(), b.flatten(), ignore_index=IGNORE)


def rows_mixed(logits: Tensor, labels: Tensor) -> Tensor:
    """The shift taken after flattening: the end of a row predicts the next row's start."""
    return F.cross_entropy(logits.flatten(0, 1)[:-1].float(), labels.flatten()[1:], ignore_index=IGNORE)


def _gradient(loss: Tensor, wrt: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(w).flatten() if g is None else g.flatten() for g, w in zip(found, wrt, strict=True)]
    ).double()


def matches(loss: Tensor, logits: Tensor, labels: Tensor, wrt: list[Tensor]) -> dict[str, tuple[float, float]]:
    """name -> (relative difference of gradients after the best factor, that factor), for each way to shift."""
    mine = _gradient(loss, wrt)
    ways = {f"shift {s}": own_loss(logits, labels, s) for s in (1, 0, 2, -1)}
    ways["rows mixed"] = rows_mixed(logits, labels)
    found = {}
    for name, other in ways.items():
        theirs = _gradient(other, wrt)
        factor = float(mine @ theirs / (theirs @ theirs).clamp(min=1e-300))
        left = float((mine - factor * theirs).norm() / mine.norm().clamp(min=1e-300))
        found[name] = (left, factor)
    return found


@contextlib.contextmanager
def _overheard(isolated: Subject, shape: tuple[int, int]) -> Iterator[list[Tensor]]:
    """The logits that the model computes meanwhile, also where a loss keeps them to itself."""
    assert isolated.module is not None
    heard: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        with contextlib.suppress(Unsupported, CannotExamineError):
            heard.append(calls.find_logits(output, shape))

    handle = isolated.module.register_forward_hook(keep)
    try:
        yield heard
    finally:
        handle.remove()


@dataclass
class Rows:
    """The logits of each position, and the gradient of the loss with respect to them."""

    logits: Tensor
    gradient: Tensor


def _compare(
    isolated: Subject, call: LossCall, tokens: Tensor, labels: Tensor | None, mask: Tensor | None = None
) -> tuple[dict[str, tuple[float, float]], Rows | None]:
    """How each way to shift matches; and the gradient with respect to the logits, where they are seen.

    Raises Unsupported where logits come with the loss, the loss is not computed from them, and no shift matches.
    """
    with _overheard(isolated, (tokens.shape[0], tokens.shape[1])) as heard:
        loss, logits = call(isolated, tokens, labels, mask)
    assert isolated.module is not None
    logits = heard[0] if logits is None and len(heard) == 1 else logits
    labels = tokens if labels is None else labels
    if logits is not None and logits.requires_grad:
        (gradient,) = torch.autograd.grad(loss, [logits], retain_graph=True, allow_unused=True)
        if gradient is not None:
            return matches(loss, logits, labels, [logits]), Rows(logits.detach(), gradient)
    wrt: list[Tensor] = [p for p in isolated.module.parameters() if p.requires_grad]
    found = matches(loss, isolated.logits(tokens), labels, wrt)
    if logits is not None and min(left for left, _ in found.values()) > MATCH:
        raise Unsupported(
            "its loss is not computed from the logits that it returns (several predictions per position, or logits of "
            "another form), so it was not compared with theirs"
        )
    return found, None


SURE = 0.999
"""A probability of the target above which its gradient is too small to tell whether the target counts."""


def _uncounted(rows: Rows, labels: Tensor, shift: int) -> Tensor | None:
    """Targets that do not count though every one that does is at this shift; None where the shift is another.

    The gradient of cross-entropy at a position is softmax minus the one-hot target: its only negative entry is the
    target. It is 0 where the position is not counted, and where the model is sure of the target: those are left out.
    """
    size = labels.shape[1]
    here = slice(max(0, -shift), size - max(0, shift))
    gradient, targets = rows.gradient[:, here], labels[:, max(0, shift) : size - max(0, -shift)]
    counted = gradient.abs().amax(-1) > 1e-9 * float(gradient.abs().max())
    sure = rows.logits[:, here].float().softmax(-1).gather(-1, targets[..., None])[..., 0] > SURE
    judged = counted & ~sure
    if not bool(judged.any()) or not torch.equal(gradient.argmin(-1)[judged], targets[judged]):
        return None
    return targets[~counted & ~sure]


def label_shift(subject: Subject) -> Iterator[Finding]:
    """Value and gradient of the reported loss against our own cross-entropy at several shifts."""
    id = "label_shift/gradient"
    call = loss_call(subject)
    if call is None or subject.module is None or not subject.vocabulary_logits:
        yield Finding.skip(id, "the model reports no loss")
        return
    with subject.isolated(max(subject.warmth / 2, 1.0)) as isolated, torch.enable_grad():
        tokens = _ordinary(isolated, isolated.tokens(3, isolated.length(17), seed=33))
        labels = _ordinary(isolated, isolated.other(tokens)) if subject.kind == "encoder" else None
        if not call.method and subject.kind != "encoder":
            labels = tokens.clone()
        found, rows = _compare(isolated, call, tokens, labels)
    best = min(found, key=lambda n: found[n][0])
    left, factor = found[best]
    wanted = [f"shift {s}" for s in call.accepted]
    evidence = {"matches": best, "factor": factor, "difference": left}
    missing = None
    if left > MATCH and rows is not None:
        targets = tokens if labels is None else labels
        missing = next((m for s in call.accepted if (m := _uncounted(rows, targets, s)) is not None), None)
    if missing is not None and len(missing):
        ids = sorted({int(i) for i in missing})
        shown = ", ".join(map(str, ids[:6])) + (" …" if len(ids) > 6 else "")
        why = f"{call.words} leaves out {len(missing)} of its targets, the rest are at the right shift (ids {shown})"
        evidence = {**evidence, "ids": ids[:20]}
        yield Finding("loss_padding/targets", Verdict.FAIL, float(len(missing)), 0.0, why, PAD_REMEDY, evidence)
    elif left > MATCH:
        why = f"{call.words}: its gradient is that of no shift of the targets (nearest: {best}, {left:.2g} apart)"
        yield Finding(id, Verdict.FAIL, left, MATCH, why, SHIFT_REMEDY, evidence)
    elif best not in wanted:
        why = f"{call.words} matches {best}; expected {' or '.join(wanted)}"
        yield Finding(id, Verdict.FAIL, left, MATCH, why, SHIFT_REMEDY, evidence)
    elif abs(factor - 1) > 1e-2:
        why = f"{call.words} is {factor:.4g} times the mean over its targets"
        yield Finding("loss_padding/denominator", Verdict.FAIL, factor, 1.0, why, PAD_REMEDY, evidence)
    else:
        other = _other_arguments(subject, call, best)
        yield other or Finding(id, Verdict.PASS, left, MATCH, f"{call.words}: gradient of {best}")
        if other is None:
            yield from _which_targets_count(subject, call, int(best.split()[1]))


def _other_arguments(subject: Subject, call: LossCall, best: str) -> Finding | None:
    """A method that shifts by itself must do so with labels, and with a mask, too: its arguments are optional.

    Labels are aligned with the tokens. An argument with another name (`targets`) may be meant for shifted ones.
    """
    if not call.method or call.needs_labels or subject.kind == "encoder":
        return None
    with subject.isolated(max(subject.warmth / 2, 1.0)) as isolated, torch.enable_grad():
        tokens = _ordinary(isolated, isolated.tokens(3, isolated.length(17), seed=33))
        ways: list[tuple[str, str, Tensor | None, Tensor | None]] = []
        if call.labels is not None:
            ways.append((call.labels, f"with {call.labels}=tokens", tokens.clone(), None))
        if call.mask is not None:
            every = torch.ones_like(tokens, dtype=torch.bool)
            ways.append((call.mask, f"with {call.mask}= and no padding", None, every))
        for argument, words, labels, mask in ways:
            try:
                found, _ = _compare(isolated, call, tokens, labels, mask)
            except Exception:  # such as labels of another form
                continue
            name = min(found, key=lambda n: found[n][0])
            if found[name][0] <= MATCH and name == "shift 0" and labels is not None and not call.labels_aligned:
                call.given_shift = 0
            elif found[name][0] <= MATCH and name != best:
                why = f"{call.words} matches {best} without labels and mask, and {name} {words}"
                evidence = {"argument": argument, "matches": name}
                return Finding(
                    "label_shift/arguments", Verdict.FAIL, found[name][0], MATCH, why, SHIFT_REMEDY, evidence
                )
    return None


def _which_targets_count(subject: Subject, call: LossCall, shift: int) -> Iterator[Finding]:
    with subject.isolated(max(subject.warmth / 2, 1.0)) as isolated:
        for name, probe in PROBES:
            id = f"loss_padding/{name}"
            try:
                reported, expected, why = probe(isolated, call, shift)
            except Unsupported as error:
                yield Finding.skip(id, str(error))
                continue
            except (IndexError, RuntimeError) as error:
                if name == "ignored" and "out of bounds" in str(error):
                    if not call.method and _minus_one_is_ignored(isolated, call, shift):
                        yield Finding(
                            id, Verdict.PASS, 0.0, 0.0, "targets of -1 do not count here, those of -100 are refused"
                        )
                        continue
                    why = "a label of -100 is not ignored: " + " ".join(str(error).split())[:80]
                    yield Finding(id, Verdict.FAIL, math.inf, 0.0, why, PAD_REMEDY)
                    continue
                yield Finding.skip(id, f"its loss does not run so: {' '.join(str(error).split())[:80]}")
                continue
            bound = max(1e3 * ulp(torch.float32), 8 * ulp(subject.dtype)) * max(abs(expected), 1e-6)
            yield Finding.judge(
                id, abs(reported - expected), bound, why, PAD_REMEDY, reported=reported, expected=expected
            )


def _ordinary(isolated: Subject, tokens: Tensor) -> Tensor:
    """Without the first and the last id: whether those count as targets is another question."""
    return tokens.clamp(1, isolated.vocab_size - 2) if isolated.vocab_size > 4 else tokens


def _every_id(isolated: Subject, call: LossCall, shift: int) -> tuple[float, float, str]:
    """The first and the last id are targets as good as any, unless one is the declared padding."""
    tokens = _ordinary(isolated, isolated.tokens(3, isolated.length(17), seed=36))
    ends = [i for i in (0, isolated.vocab_size - 1) if i != isolated.pad]
    for position, id in enumerate(ends):
        tokens[:, 3 + 4 * position : 6 + 4 * position] = id
    labels = None if call.method and isolated.kind != "encoder" else tokens.clone()
    loss, logits = call(isolated, tokens, labels)
    logits = isolated.logits(tokens) if logits is None else logits
    return float(loss), float(own_loss(logits, tokens, shift)), f"targets of id {' and '.join(map(str, ends))} count"


def _ignored(isolated: Subject, call: LossCall, shift: int) -> tuple[float, float, str]:
    """Targets of -100 do not count, neither above nor below the line."""
    tokens = isolated.tokens(3, isolated.length(17), seed=34)
    labels = isolated.other(tokens) if isolated.kind == "encoder" else tokens.clone()
    labels[0, 5:] = IGNORE
    labels[1, 3:7] = IGNORE
    shift = shift if call.given_shift is None else call.given_shift
    loss, logits = call(isolated, tokens, labels)
    logits = isolated.logits(tokens) if logits is None else logits
    return float(loss), float(own_loss(logits, labels, shift)), "mean over the targets that are not -100"


def _minus_one_is_ignored(isolated: Subject, call: LossCall, shift: int) -> bool:
    """nanoGPT's convention: the caller marks with -1."""
    tokens = isolated.tokens(3, isolated.length(17), seed=34)
    labels = tokens.clone()
    labels[0, 5:] = -1
    try:
        loss, logits = call(isolated, tokens, labels)
    except (IndexError, RuntimeError):
        return False
    expected = own_loss(
        isolated.logits(tokens) if logits is None else logits, labels.masked_fill(labels == -1, IGNORE), shift
    )
    return abs(float(loss) - float(expected)) < 1e-4


def _padded(isolated: Subject, call: LossCall, shift: int) -> tuple[float, float, str]:
    """A right-padded batch: the mean over all real targets, not the mean of the rows' means."""
    batch = padded(isolated, isolated.length(17), amounts(isolated, 0, 4, 11), "right", pad_fill(isolated))
    labels = None
    if isolated.kind == "encoder" or not call.method:
        labels = torch.where(batch.mask, batch.tokens, IGNORE)
    loss, _ = call(isolated, batch.tokens, labels, batch.mask)
    total, count = 0.0, 0
    for b, row in enumerate(batch.rows):
        given = {"source": isolated.source(3)[b : b + 1]} if isolated.kind == "seq2seq" else {}
        n = row.shape[1] - abs(shift)
        logits = _seq2seq_logits(isolated, call, row, given) if isolated.kind == "seq2seq" else isolated.logits(row)
        total += float(own_loss(logits, row, shift)) * n
        count += n
    return float(loss), total / count, "token-weighted mean of the rows' own losses"


def _seq2seq_logits(isolated: Subject, call: LossCall, row: Tensor, given: dict[str, Tensor]) -> Tensor:
    if call.method:
        return isolated.logits(row, **given)
    output = isolated.model(given["source"], **isolated.interface.flags, **{str(call.labels): row})
    return isolated.logits_in(output, row)


def _pad_content(isolated: Subject, call: LossCall, shift: int) -> tuple[float, float, str]:
    """Other tokens in padding positions leave the loss as it is."""
    if call.mask is None or not call.method:
        raise Unsupported("labels of padding are the caller's here")
    batch = padded(isolated, isolated.length(17), amounts(isolated, 0, 4, 11), "right", pad_fill(isolated))
    labels = torch.where(batch.mask, batch.tokens, IGNORE) if isolated.kind == "encoder" else None
    first, _ = call(isolated, batch.tokens, labels, batch.mask)
    junk = batch.tokens.clone()
    junk[~batch.mask] = isolated.other(batch.tokens)[~batch.mask]
    second, _ = call(isolated, junk, labels, batch.mask)
    return float(second), float(first), "the loss does not depend on what stands in padding"


def _accumulated(isolated: Subject, call: LossCall, shift: int) -> tuple[float, float, str]:
    """Uneven rows in one batch, and in two micro-batches weighted by their counted targets: the same loss.

    Rows keep their padded length, so that what padding does to logits is the same on both sides.
    """
    batch = padded(isolated, isolated.length(17), amounts(isolated, 0, 12, 9, 3), "right", pad_fill(isolated))
    parts = (slice(0, 1), slice(1, 4))
    marked = call.labels is not None and (call.mask is None or not call.method or isolated.kind == "encoder")
    shift = call.given_shift if marked and call.given_shift is not None else shift

    def loss(rows: slice) -> float:
        tokens, mask = batch.tokens[rows], batch.mask[rows]
        labels = torch.where(mask, tokens, IGNORE) if marked else None
        source = isolated.source(4)[rows]  # a source belongs to its row
        return float(call(isolated, tokens, labels, None if call.mask is None else mask, source)[0])

    if not marked and call.mask is None:
        raise Unsupported("its loss takes neither labels nor a mask, so every target counts")
    counts = [sum(row.shape[1] - abs(shift) for row in batch.rows[rows]) for rows in parts]
    weighted = sum(n * loss(rows) for n, rows in zip(counts, parts, strict=True)) / sum(counts)
    return loss(slice(0, 4)), weighted, "micro-batches weighted by their counted targets give the large batch's loss"


PROBES: tuple[tuple[str, Callable[[Subject, LossCall, int], tuple[float, float, str]]], ...] = (
    ("every-id", _every_id),
    ("ignored", _ignored),
    ("padded", _padded),
    ("pad-content", _pad_content),
    ("accumulation", _accumulated),
)
"""Made only where the unpadded loss is right (label_shift): what is left is which targets count, and by what."""
