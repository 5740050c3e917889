"""Rounding or bug: a difference is measured as the model is given, again with warm weights, and in float64.

Fresh weights make attention almost uniform and hide bugs, so each measurement is repeated with matrices times six. A
difference above its bound is repeated in float64: rounding shrinks with the precision, a bug does not.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.subject.isolate import AllDouble
from glassformer.doctor.subject.measure import SAME_WHY, gap, rms, same_shape_bound
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

SHRINKS = 1e-2
"""float64 has 2^29 times finer steps than float32; parts hard-coded in float32 leave less, a hundredth is certain."""

FAINT = 40.0
"""Times the same-shape bound, 32 ulp: where float64 does not run, less is rounding (experts regroup tokens)."""


@dataclass
class Measured:
    """A difference, the bound it should keep, and what to say about it."""

    gap: float
    bound: float
    why: str
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        if not math.isfinite(self.gap):
            return math.inf
        return self.gap / self.bound if self.bound > 0 else (math.inf if self.gap > 0 else 0.0)


Measure = Callable[[Subject], Measured]


def worst(measured: list[Measured]) -> Measured:
    """The one furthest beyond its bound; the first of equals."""
    return max(measured, key=lambda m: m.ratio)


def first_over(measured: list[Measured]) -> Measured:
    """The first beyond its bound, in the order of the experiment; the worst when none is."""
    return next((m for m in measured if m.ratio > 1), worst(measured))


def judge(
    subject: Subject,
    id: str,
    measure: Measure,
    remedy: str,
    warm: bool = True,
    train: bool = False,
    own: bool = False,
) -> Finding:
    """Measure as given, then warm; repeat what is over its bound in float64. `own`: `measure` writes to the weights."""
    seen: list[Measured] = []
    looks = (subject.warmth,) if warm and subject.large else (1.0, subject.warmth if warm else 1.0)
    for factor in dict.fromkeys(looks):
        with subject.isolated(factor, train=train, own=own) as isolated:
            found = measure(isolated)
        if found.ratio > 1:
            precise = _in_double(subject, measure, factor, train, own)
            faint = precise is None and found.why == SAME_WHY and found.gap <= FAINT * found.bound
            if faint or shrinks(found, precise):
                found = Measured(0.0, found.bound, found.why, {**found.evidence, "rounding": found.gap})
            else:
                evidence = {**found.evidence, "weights": "as given" if factor == 1.0 else f"matrices x {factor:g}"}
                if precise is not None:
                    evidence["float64"] = precise.gap
                return Finding(id, Verdict.FAIL, found.gap, found.bound, found.why, remedy, evidence)
        seen.append(found)
    best = worst(seen)
    return Finding(id, Verdict.PASS, best.gap, best.bound, best.why, "", best.evidence)


def shrinks(found: Measured, precise: Measured | None) -> bool:
    """Whether a difference is rounding: it is finite, and nearly gone in float64."""
    return precise is not None and math.isfinite(found.gap) and precise.gap <= SHRINKS * found.gap


def in_double(subject: Subject, measure: Measure) -> Measured | None:
    """Measure in float64, with the weights as given; None where the model cannot be examined in float64."""
    return _in_double(subject, measure, 1.0, False, False)


def _in_double(subject: Subject, measure: Measure, factor: float, train: bool, own: bool) -> Measured | None:
    """The same measurement in float64, where the model computes there what it computes in its own precision."""
    if subject.module is None or subject.dtype == torch.float64:
        return None
    with contextlib.suppress(Exception):
        tokens = subject.tokens(2, subject.length(9))
        # half precision is off by hundredths where attention is sharp; float32 then tells whether float64 is the same
        with subject.isolated(dtype=torch.float32 if subject.dtype.itemsize < 4 else None) as isolated:
            single = isolated.logits(tokens)
        with subject.isolated(dtype=torch.float64) as isolated:
            double = isolated.logits(tokens)
        if gap(single, double.to(single.dtype)) > 1e-2 * rms(single):
            return None
        # first with everything in float64: parts that ask for float32 by name keep their rounding
        for mode in (AllDouble(), contextlib.nullcontext()):
            with contextlib.suppress(Exception), subject.isolated(factor, torch.float64, train, own) as isolated, mode:
                return measure(isolated)
    return None


def prefix_noise(isolated: Subject, tokens: Tensor, whole: Tensor | None = None, **given: Any) -> float:
    """N = max over t of |f(x[:t]) - f(x)[:t]|: the model's own rounding between shapes. No cache, no mask.

    An encoder's prefixes differ for a reason, so there a row alone is compared with itself in a batch. `whole` is f(x)
    where it is known. N over the logits' size belongs to the weights: of a large model it is measured once per look.
    """
    whole = isolated.logits(tokens, **given) if whole is None else whole
    if isolated.large and isolated.look:
        if isolated.look not in isolated.noise:
            isolated.noise[isolated.look] = _noise(isolated, tokens, whole, **given) / max(rms(whole), 1e-30)
        return isolated.noise[isolated.look] * rms(whole)
    return _noise(isolated, tokens, whole, **given)


def _noise(isolated: Subject, tokens: Tensor, whole: Tensor, **given: Any) -> float:
    if isolated.kind == "encoder":
        return gap(isolated.logits(tokens[:1], **given), isolated.logits(tokens[:1].expand(3, -1), **given)[:1])
    length = tokens.shape[1]
    found = 0.0
    lengths = {length // 2, length - 1} if isolated.large else {1, 2, length // 2, length - 1}
    for t in sorted(t for t in {max(1, t) for t in lengths} if isolated.takes(t)):
        found = max(found, gap(isolated.logits(tokens[:, :t], **given), whole[:, :t]))
    # a leak would enter here as a difference; N is rounding, so it is capped at what rounding can be
    return min(found, 1e-4 * rms(whole))


def untouched(a: Tensor, b: Tensor, why: str, **evidence: Any) -> Measured:
    """Two results of the same shape that must be the same to the bit."""
    return Measured(gap(a, b), same_shape_bound(a), why, evidence)
