"""How a model wants to be called, found by trying: required arguments, lengths, layout, caches that it keeps itself.

A model that runs on a plain (2, 5) batch is left as it is. Otherwise each combination of values for its required
arguments is tried, at several lengths. Among those that run, one under which no output depends on later tokens is
preferred: where the caller passes the mask, the caller makes the model causal.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.subject.arguments import ADDRESSES, SETUPS, Filler, Setup, fillers
from glassformer.doctor.subject.caches import settle_cache
from glassformer.doctor.subject.errors import CannotExamineError, Unsupported
from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.measure import gap, same_shape_bound
from glassformer.doctor.subject.subject import Subject

SIZES = (5, 8, 16, 32, 64, 128)
"""Lengths that are tried: a model may take multiples of a block only, or one length."""
TRIALS = 200
"""Combinations of arguments that are tried at most for one length."""


def settle_call(subject: Subject) -> None:
    """Fill in required arguments, the step between lengths, and the layout. What fails is left to the first call."""
    face = subject.interface
    plain = _runs(subject, 5)
    if not plain and not face.required:
        _settle_setup(subject)
        plain = _runs(subject, 5)
    if not plain:
        most = subject.facts.whole("max_len") or SIZES[-1]
        if face.required and (name := _setup_of(subject)) is not None:
            face.setup = Setup(name, min(most, 4096))
            if not _settle_fill(subject, SIZES[0]):
                face.setup = None
        for length in dict.fromkeys([*(n for n in SIZES if n <= most), min(most, 4096)]):
            if _settle_fill(subject, length):
                _settle_step(subject, length, most)
                break
        else:
            return
    _settle_layout(subject)
    settle_cache(subject)


def _runs(subject: Subject, length: int) -> bool:
    """Whether a plain call gives logits, of all positions or of the last one."""
    try:
        _logits(subject, subject.tokens(2, length))
    except Unsupported:
        return True
    except (Exception, SystemExit):
        return False
    return True


def _logits(subject: Subject, tokens: Tensor) -> Tensor:
    with quiet(), subject.isolated() as isolated:
        return isolated.logits(tokens)


def _choices(subject: Subject) -> Iterator[dict[str, Filler]]:
    face = subject.interface
    lists = []
    for name in face.required:
        nothing: list[Filler] = [lambda t, start: None]
        labels: list[Filler] = [lambda t, start: t.clone(), *nothing]
        lists.append(nothing if name == face.cache else labels if name == face.labels else fillers(name) or nothing)
    for way in itertools.islice(itertools.product(*lists), TRIALS):
        yield dict(zip(face.required, way, strict=True))


def _settle_fill(subject: Subject, length: int) -> bool:
    """Choose values for the required arguments at one length; False where none runs."""
    face = subject.interface
    running: dict[str, Filler] | None = None
    for fill in _choices(subject):
        face.fill = fill
        if not _runs(subject, length):
            continue
        running = fill if running is None else running
        decides = any("mask" in name for name in face.required) and subject.kind != "encoder"
        if not decides or _is_causal(subject, length):
            return True
    face.fill = running or {}
    return running is not None


def _is_causal(subject: Subject, length: int) -> bool:
    """Whether the logits are finite and no position reads the last token: a mask the wrong way round gives NaN."""
    tokens = subject.tokens(2, length)
    changed = tokens.clone()
    changed[:, -1] = subject.other(tokens)[:, -1]
    try:
        one, two = _logits(subject, tokens), _logits(subject, changed)
    except Exception:
        return True
    return bool(one.isfinite().all()) and gap(one[:, :-1], two[:, :-1]) <= same_shape_bound(one)


def _settle_step(subject: Subject, length: int, most: int) -> None:
    """Inputs of any length, of multiples of a block, or of one length only."""
    if length == SIZES[0] or any(_runs(subject, n) for n in (length + 1, length + 3) if n <= most):
        return
    subject.multiple = length
    if 2 * length > most or not _runs(subject, 2 * length):
        subject.limit = length
        subject.notes.append(f"it takes inputs of {length} tokens only: what compares lengths was not examined.")
        return
    while subject.multiple % 2 == 0 and _runs(subject, length + subject.multiple // 2):
        subject.multiple //= 2
    subject.notes.append(f"it takes inputs whose length is a multiple of {subject.multiple}.")


def _settle_layout(subject: Subject) -> None:
    """Whether tokens are (T,B): then one token moves outputs of its column, in other rows, and of no other column."""
    face = subject.interface
    if face.library or face.is_seq2seq or subject.module is None or subject.multiple > 1:
        return
    with contextlib.suppress(Exception, CannotExamineError, Unsupported):
        tokens = subject.tokens(4, 5)
        changed = tokens.clone()
        changed[1, 2] = subject.other(tokens)[1, 2]
        moved = (_logits(subject, tokens) - _logits(subject, changed)).abs().amax(-1) > 0
        others = torch.arange(5) != 2
        if bool(moved[2:, 2].any()) and not bool(moved[:, others].any()):
            face.time_first = True
            subject.notes.append("it takes tokens as (T,B), with time first.")


def _setup_of(subject: Subject) -> str | None:
    """The method that makes the caches which a model keeps itself."""
    if subject.module is None:
        return None
    return next((n for n in SETUPS if callable(getattr(subject.model, n, None))), None)


def _settle_setup(subject: Subject) -> None:
    """A model that does not run before its caches are made: make them as its own method does, for each call."""
    face = subject.interface
    name = _setup_of(subject)
    if name is None or subject.module is None:
        return
    face.setup = Setup(name, subject.facts.whole("max_len") or 256)
    optional: Any = inspect.signature(subject.module.forward).parameters
    address = next((n for n in ADDRESSES if n in optional), None)
    if address is not None:
        for filler in fillers(address):
            face.fill = {address: filler}
            if _runs(subject, 5):
                return
    face.fill = {}
    if not _runs(subject, 5):
        face.setup = None
