"""Every token can be learned: no id is left out of the loss, and targets at padding are.

A loss that masks the end-of-text id, because padding has the same id, trains a model that never stops. A loss that is
given a mask and counts targets at padding trains a model to predict padding.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from glassformer.doctor.probes import training
from glassformer.doctor.probes.padding import pad_fill, padded
from glassformer.doctor.subject.loss import loss_call
from glassformer.doctor.subject.measure import ulp
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

IDS, PADDING = "loss_padding/ids", "loss_padding/pad-labels"
ENDS = ("eos", "eot", "end_of_text", "end_id", "end_token")
SWEEP = 512
"""Vocabularies up to this size are tried in full, larger ones at their ends, their special ids and random ones."""


def special_ids(subject: Subject) -> dict[str, list[int]]:
    """Fields of the config that hold token ids -> the ids."""
    found: dict[str, list[int]] = {}
    for name, value in subject.facts.raw.items():
        if not any(word in name.lower() for word in ("token_id", "_id", "eos", "bos", "pad", *ENDS)):
            continue
        ids = [i for i in (value if isinstance(value, list | tuple) else [value]) if type(i) is int]
        if ids and all(0 <= i < subject.vocab_size for i in ids):
            found[name] = ids
    return found


def must_count(subject: Subject) -> list[int]:
    """Ids that have to count as targets: all but padding; padding too where it is the end of a text."""
    special = special_ids(subject)
    ends = {i for name, ids in special.items() if any(word in name.lower() for word in ENDS) for i in ids}
    size = subject.vocab_size
    if size <= SWEEP and not subject.large:
        ids = list(range(size))
    else:
        draw = torch.randint(0, size, (24,), generator=torch.Generator().manual_seed(47)).tolist()
        ids = [*range(8), *range(size - 8, size), *(i for named in special.values() for i in named), *draw]
    return [i for i in dict.fromkeys(ids) if i != subject.pad or i in ends]


def every_id_counts(subject: Subject) -> Iterator[Finding]:
    """The gradient of the loss with respect to the logits is not zero wherever an id is the target."""
    call = loss_call(subject)
    if call is None or subject.module is None or not subject.vocabulary_logits:
        yield Finding.skip(IDS, "the model reports no loss")
        return
    missing, seen = set[int](), 0
    with subject.isolated(max(subject.warmth / 2, 1.0)) as isolated, torch.enable_grad():
        for targets in _batches(isolated, must_count(subject)):
            # an encoder is not asked for what it reads: it may be sure of that, and then nothing shows what counts
            both_ways = subject.kind == "encoder"
            tokens = isolated.other(targets) if both_ways else targets
            _, rows = training._compare(isolated, call, tokens, targets if both_ways or not call.method else None)
            if rows is None:
                break
            left = [m for s in call.accepted if (m := training._uncounted(rows, targets, s)) is not None]
            if left:
                seen += 1
                missing |= {int(i) for i in min(left, key=len)}
    if not seen:
        yield Finding.skip(IDS, "the loss is of another kind, or its logits were not seen: see label_shift")
        return
    ids = sorted(missing - {subject.pad} if subject.pad not in must_count(subject) else missing)
    why = f"{len(ids)} of the ids that can be targets do not count in the loss"
    if ids:
        named = {i: name for name, given in special_ids(subject).items() for i in given}
        shown = ", ".join(f"{i} ({named[i]})" if i in named else str(i) for i in ids[:6]) + (
            " …" if len(ids) > 6 else ""
        )
        why = f"targets of id {shown} do not count in the loss: the model never learns to produce them"
    remedy = "Mask targets by position (-100 where the mask says padding), not by id; give padding an id of its own."
    verdict = Verdict.FAIL if ids else Verdict.PASS
    yield Finding(IDS, verdict, float(len(ids)), 0.0, why, remedy, {"ids": ids[:20]} if ids else {})


def _batches(isolated: Subject, ids: list[int]) -> Iterator[Tensor]:
    """Targets among which is each id, for a model that shifts and for one that does not."""
    length, rows = isolated.length(17), 3
    room = rows * (length - 1)
    for start in range(0, len(ids), room):
        tokens = isolated.tokens(rows, length, seed=36)
        some = torch.tensor(ids[start : start + room], device=tokens.device)
        flat = tokens[:, 1:].clone().flatten()
        flat[: len(some)] = some
        yield torch.cat([tokens[:, :1], flat.view(rows, length - 1)], dim=1)


def padding_labels(subject: Subject) -> Finding:
    """An encoder's loss() that is given a mask does not count labels at padding."""
    call = loss_call(subject)
    if subject.kind != "encoder" or call is None or subject.module is None or not subject.vocabulary_logits:
        return Finding.skip(PADDING, "not an encoder that reports a loss")
    if not call.method or call.mask is None or call.labels is None:
        return Finding.skip(PADDING, "labels at padding are the caller's, to be marked with -100")
    with subject.isolated(max(subject.warmth / 2, 1.0)) as isolated:
        batch = padded(isolated, isolated.length(17), [0, 4, 11], "right", pad_fill(isolated))
        labels = isolated.other(batch.tokens)
        others = torch.where(batch.mask, labels, isolated.other(labels, 7))
        one, two = (float(call(isolated, batch.tokens, given, batch.mask)[0]) for given in (labels, others))
    bound = max(1e3 * ulp(torch.float32), 8 * ulp(subject.dtype)) * max(abs(one), 1e-6)
    why = "other labels at padding leave the loss as it is, where the loss is given a mask"
    return Finding.judge(PADDING, abs(one - two), bound, why, training.PAD_REMEDY, first=one, second=two)
