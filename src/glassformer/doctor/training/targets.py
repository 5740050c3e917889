"""What the loss trains towards: the shift of the labels, padding, the end of a text, and the weight of each target."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.measure import many
from glassformer.doctor.training.listen import Forward, Update
from glassformer.finding import Finding, Verdict

SHIFTS = (1, 0, 2, -1, 3)
MOST = 0.95
"""Share of the targets that must be the token at one distance; chance agreements stay far below."""
UNEQUAL = 1.2
"""Ratio of weights above which two targets do not count equally."""


def share(forwards: list[Forward], shift: int) -> float:
    """Return the share of trained positions whose target is the input token `shift` later."""
    hits = total = 0
    for f in forwards:
        length = f.tokens.shape[1]
        first, last = max(0, -shift), length - max(0, shift)
        at = f.trained[:, first:last]
        same = f.targets[:, first:last] == f.tokens[:, first + shift : last + shift]
        hits, total = hits + int((same & at).sum()), total + int(at.sum())
    return hits / total if total else 0.0


def label_shift(update: Update, kind: str) -> Finding:
    """The target at position t is the input token at t + 1."""
    id, forwards = "label_shift/targets", update.examined()
    if kind != "decoder":
        return Finding.skip(id, f"targets of {kind} training are not the next tokens of its input")
    shares = {s: share(forwards, s) for s in SHIFTS}
    best = max(shares, key=lambda s: shares[s])
    evidence = {f"shift {s}": round(v, 3) for s, v in shares.items()}
    if shares[best] < MOST:
        return Finding.skip(id, "the targets are not tokens of the input at one distance, so the shift is not known")
    if shares[1] >= MOST and best != 1:
        return Finding.skip(id, "the tokens repeat, so that several shifts fit: give a batch of varied tokens")
    words = {
        0: "each position is trained to repeat its own input token: the labels are not shifted",
        2: "each position is trained towards the token after the next one: the labels are shifted twice",
        -1: "each position is trained towards the token before it: the labels are shifted the wrong way",
        3: "each position is trained towards the third token after it",
    }
    why = words.get(best, "each position is trained towards the next token")
    remedy = "Shift once: the caller (inputs[:-1], targets[1:]) or the model, not both and not neither."
    return Finding("label_shift/targets", Verdict.PASS if best == 1 else Verdict.FAIL, best, 1.0, why, remedy, evidence)


def padding_targets(update: Update, pad: int | None) -> Finding:
    """No padding is a target, except the first one after a text, which may mark its end."""
    id, found, seen = "loss_padding/targets", 0, 0
    for f in update.examined():
        padding = _padding(f, pad)
        if padding is None:
            continue
        following = torch.zeros_like(padding)
        following[:, :-1] = padding[:, 1:] & padding[:, :-1]  # both, so that the first one after a text may be learned
        seen += int(following.sum())
        found += int((following & f.trained & (f.targets == torch.roll(f.tokens, -1, 1))).sum())
    if not seen:
        return Finding.skip(id, "the batch has no padding that a mask or the padding id shows")
    remedy = "Set labels at padding to -100 (ignore_index)."
    return Finding.judge(id, float(found), 0.0, f"padding tokens that are targets, of {seen}", remedy)


def _padding(f: Forward, pad: int | None) -> Tensor | None:
    """Where the input is padding: what the mask hides, or a run of the padding id at either end."""
    if f.mask is not None and f.mask.shape == f.tokens.shape:
        return f.mask == 0
    if pad is None:
        return None
    same = f.tokens == pad
    ends = same.flip(1).long().cumprod(1).flip(1).bool() | same.long().cumprod(1).bool()
    return ends if bool((ends.sum(1) > 1).any()) else None


def mask_given(update: Update, pad: int | None) -> Finding:
    """A batch with padding on the left comes with a mask."""
    id = "missing_mask/left-padding"
    if pad is None:
        return Finding.skip(id, "no padding id is known: give tokenizer=")
    left = [f for f in update.forwards if bool(((f.tokens[:, 0] == pad) & (f.tokens[:, 1] == pad)).any())]
    if not left:
        return Finding.skip(id, "no sequence begins with padding")
    open_ = sum(f.mask is None for f in left)
    remedy = "Pass the tokenizer's attention_mask to the model."
    return Finding.judge(id, float(open_), 0.0, "forward passes with padding on the left and no mask", remedy)


def end_is_learned(update: Update, end: int | None) -> Finding:
    """The end of a text is a target where it follows a text."""
    id = "end_never_learned/targets"
    if end is None:
        return Finding.skip(id, "no id of the end of a text is known: give tokenizer=")
    due = learned = others = of = 0
    for f in update.examined():
        following = torch.roll(f.tokens, -1, 1)
        ends = (following == end) & (f.tokens != end)
        ends[:, -1] = False
        rest = (following != end) & (f.tokens != end)
        rest[:, -1] = False
        due, learned = due + int(ends.sum()), learned + int((ends & f.trained).sum())
        others, of = others + int((rest & f.trained).sum()), of + int(rest.sum())
    if not due:
        return Finding.skip(id, "no text of the batch ends")
    if 2 * others < of:
        return Finding.skip(id, "less than half of the tokens are targets, so that an end may be left out by design")
    remedy = (
        "Padding has the id of the end: mask labels by the attention mask, not by the id, or use another padding id."
    )
    return Finding.judge(
        id, float(due - learned), float(due - 1), f"ends of texts that are no target, of {due}", remedy
    )


def weights(update: Update) -> Iterator[Finding]:
    """Each target counts equally, and all together once."""
    forwards = update.examined()
    total = sum(float(torch.nansum(f.weights)) for f in forwards)
    known = sum(int((~f.weights.isnan()).sum()) for f in forwards)
    trained = sum(int(f.trained.sum()) for f in forwards)
    if not known:
        raise Unsupported("every target is predicted with certainty, so the weights are not known")
    total *= trained / known
    scaled = total * update.factor
    yield from _scale(total, scaled, len(forwards), trained, sum(f.tokens.numel() for f in forwards))
    yield _parts(forwards)


def _scale(total: float, scaled: float, parts: int, trained: int, places: int) -> Iterator[Finding]:
    evidence: dict[str, Any] = {"backward": round(total, 4), "forward passes": parts, "targets": trained}
    why = "the gradient that the optimizer gets over that of the mean loss per target; clipping makes it smaller"
    remedy = "Divide the loss by the number of accumulation steps; unscale the gradients before the optimizer."
    id = "loss_scale/gradient"
    if scaled > 1.5 and parts == 1 and scaled < 256:
        yield Finding.skip(
            id, f"the loss is {scaled:.3g} times the mean per target, such as a sum: the rate must fit it"
        )
    else:
        yield Finding.judge(id, scaled, 1.5, why, remedy, **evidence)
    part = trained / places
    padded = part < 0.9 and abs(total - part) < (1 - part) / 4
    why = "the targets count, all together, as much as one mean: not less because padding is in the denominator"
    remedy = "Divide by the number of targets that count, not by batch size times length."
    yield Finding.judge("loss_padding/denominator", float(padded), 0.0, why, remedy, **evidence)


def _parts(forwards: list[Forward]) -> Finding:
    """Targets of accumulated parts with different numbers of targets count equally."""
    id = "accumulation_weights/parts"
    sizes = [int(f.trained.sum()) for f in forwards]
    if len(forwards) < 2 or max(sizes) < UNEQUAL * min(sizes):
        why = "one forward pass" if len(forwards) < 2 else "equally many targets in each forward pass"
        return Finding.skip(id, f"an update has {why}: give a batch whose parts differ in their number of targets")
    means = [float(f.weights.nanmean()) for f in forwards]
    why = f"ratio of the weights of targets in parts of {min(sizes)} to {many(max(sizes), 'target')}"
    remedy = "Divide the sum of all parts by the number of targets of the whole update, not each part by its own."
    return Finding.judge(id, max(means) / max(min(means), 1e-30), UNEQUAL, why, remedy, targets=sizes)
