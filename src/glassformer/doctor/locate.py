"""Where a fault sits: the first block whose output differs between two runs that should agree."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.probes.caching import permute_rows, roll_back, run_chunks
from glassformer.doctor.probes.causality import block_outputs, first_leaking_block, layer_number
from glassformer.doctor.probes.padding import pad_fill, padded
from glassformer.doctor.subject.isolate import NoDropout, quiet
from glassformer.doctor.subject.measure import gap, rms
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding

Outputs = dict[str, Tensor]
EXACT, ROUNDED = 1e-6, 1e-3
"""Of a block's size: what should be the same to the bit, and what differs in shape, with warm weights."""


def layer_of_fault(subject: Subject, group: list[Finding]) -> int | None:
    """The layer of a diagnosis whose probes named none; None where there are no blocks or no layer can be named."""
    name = group[0].id.split("/")[0]
    find = FINDERS.get(name)
    if find is None or not subject.blocks():
        return None
    with contextlib.suppress(Exception), quiet():
        return layer_number(find(subject, group[0]), subject)
    return None


def first_apart(one: Outputs, two: Outputs, select: Callable[[Tensor], Tensor], tolerance: float) -> str | None:
    for name, a in one.items():
        b = two.get(name)
        if b is not None and gap(select(a), select(b)) > tolerance * max(rms(select(a)), 1e-30):
            return name
    return None


def _leak(subject: Subject, finding: Finding) -> str | None:
    train = finding.id == "causal_leak/train-mode"
    warm = 1.0 if finding.evidence.get("weights", "as given") == "as given" else subject.warmth
    cut, length = finding.evidence.get("cut", 10), finding.evidence.get("length", 24)
    return first_leaking_block(subject, train, warm, length, cut)


def _padding(subject: Subject, finding: Finding) -> str | None:
    if "source" in finding.id:
        return None
    with subject.isolated(subject.warmth) as isolated:
        batch = padded(
            isolated, isolated.length(19), [0, 3, 8], finding.evidence.get("side", "left"), pad_fill(isolated)
        )
        junk = batch.tokens.clone()
        junk[~batch.mask] = isolated.other(batch.tokens, 40)[~batch.mask]
        one, two = (block_outputs(isolated, t, mask=batch.mask) for t in (batch.tokens, junk))
    return first_apart(one, two, lambda t: t[batch.mask] if t.shape[:2] == batch.mask.shape else t[:0], EXACT)


def _nan(subject: Subject, finding: Finding) -> str | None:
    dtype = next((d for d in (torch.bfloat16, torch.float16) if str(d) == finding.evidence.get("dtype")), None)
    with subject.isolated(dtype=dtype) as isolated:
        batch = padded(isolated, isolated.length(16), [0, 3, 8], "left", pad_fill(isolated))
        outputs = block_outputs(isolated, batch.tokens, mask=batch.mask)
    return next((n for n, out in outputs.items() if not bool(torch.isfinite(out).all())), None)


def _neighbour(subject: Subject, finding: Finding) -> str | None:
    with subject.isolated(subject.warmth) as isolated:
        tokens = isolated.tokens(3, isolated.length(24), seed=2)
        changed = tokens.clone()
        changed[1:] = isolated.other(tokens)[1:]
        one, two = block_outputs(isolated, tokens), block_outputs(isolated, changed)
    return first_apart(one, two, lambda t: t[0], EXACT)


def _repeat(subject: Subject, finding: Finding) -> str | None:
    """Two calls on the same tokens, others between: random numbers, or something kept."""
    subject = Subject(**{**vars(subject), "mute": False})
    with subject.isolated() as isolated:
        tokens = isolated.tokens(2, isolated.lengths()[-1], seed=1)
        one = block_outputs(isolated, tokens)
        isolated.logits(isolated.tokens(3, isolated.lengths()[-1], seed=5))
        two = block_outputs(isolated, tokens)
    return first_apart(one, two, lambda t: t, EXACT)


def _modes(subject: Subject, finding: Finding) -> str | None:
    if finding.id != "position_train_infer/modes":
        return None
    with subject.isolated(subject.warmth) as isolated, NoDropout():
        assert isolated.module is not None
        tokens = isolated.tokens(2, finding.evidence.get("length", 24), seed=6)
        one = block_outputs(isolated, tokens)
        isolated.module.train()
        two = block_outputs(isolated, tokens)
    return first_apart(one, two, lambda t: t, ROUNDED)


Given = dict[str, Any]


def _after(subject: Subject, change: Callable[[Subject, Any, Tensor, Given], tuple[Any, Tensor, Given]]) -> str | None:
    """A cached step after something was done to the cache, against the full pass."""
    with subject.isolated(subject.warmth) as isolated:
        tokens = isolated.tokens(3, 8, seed=8)
        given: Given = {"source": isolated.source(3)} if isolated.kind == "seq2seq" else {}
        _, cache = run_chunks(isolated, tokens, [6], **given)
        cache, sequence, given = change(isolated, cache, tokens, given)
        step = block_outputs(isolated, sequence[:, 6:7], cache=cache, with_cache=True, **given)
        full = block_outputs(isolated, sequence[:, :7], **given)
    # an encoder's blocks run in both calls on the same source, or in one of them
    return first_apart({n: t[:, -1:] for n, t in full.items()}, step, lambda t: t[:, -1:], ROUNDED)


def _reordered(subject: Subject, finding: Finding) -> str | None:
    def change(isolated: Subject, cache: Any, tokens: Tensor, given: Given) -> tuple[Any, Tensor, Given]:
        order = torch.tensor([2, 0, 1], device=tokens.device)
        moved = {name: value[order] for name, value in given.items()}
        return permute_rows(cache, order), torch.cat([tokens[order][:, :6], tokens[:, 6:]], dim=1), moved

    return _after(subject, change)


def _cropped(subject: Subject, finding: Finding) -> str | None:
    def change(isolated: Subject, cache: Any, tokens: Tensor, given: Given) -> tuple[Any, Tensor, Given]:
        _, cache = run_chunks(isolated, isolated.other(tokens), [2], cache=cache, start=6, **given)
        return roll_back(cache, 6, 2), tokens, given

    return _after(subject, change)


FINDERS: dict[str, Callable[[Subject, Finding], str | None]] = {
    "causal_leak": _leak,
    "pad_leak": _padding,
    "mask_nan": _nan,
    "batch_variance": _neighbour,
    "eval_stochastic": _repeat,
    "state_leak": _repeat,
    "position_train_infer": _modes,
    "cache_reorder": _reordered,
    "cache_rollback": _cropped,
}
"""diagnosis -> the experiment that finds its block."""
