"""The values are averaged with softmax(scores): attention weights that are changed after softmax are found here.

Changes by design are not reported: a mask, dropout, a constant factor, a renormalisation, and any operation with
another tensor (talking heads, differential attention, a learned exponent). No published design applies a second softmax
or a fixed function such as the square to each weight: both make attention flatter or sharper than the scores say.
"""

import torch
from torch import Tensor

from glassformer.doctor.probes.attention import NOTHING, Seen, traced
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

SAME = 1e-3
"""Relative: weights that differ from softmax's by less, up to a factor per query, are the same."""
ID = "attention_weights/after-softmax"


def used_as_they_are(subject: Subject) -> Finding:
    """What multiplies v is the output of softmax, up to masks and factors. Warm weights: uniform ones look alike."""
    seen = traced(subject, warm=subject.warmth)
    if not seen:
        return Finding.skip(ID, NOTHING)
    unclear = None
    for one in seen:
        found = one.attention
        if not found.changes:
            continue
        if "softmax" in found.changes:
            why = f"in {one.location} softmax is applied a second time, to the attention weights"
            return _failed(one, why, "Apply softmax once, to the masked scores, and multiply its output with v.")
        pair = _aligned(one)
        if pair is None or _proportional(*pair):
            continue
        if found.mixed:
            unclear = (
                f"in {one.location} other tensors change the attention weights after softmax ({_ops(found.changes)})"
            )
            continue
        power = _exponent(*pair)
        how = f"raised to the power {power:.3g}" if power is not None else f"changed by {_ops(found.changes)}"
        low, high = (float(x) for x in pair[1].sum(-1).aminmax())
        sums = "" if max(abs(low - 1), abs(high - 1)) < SAME else f"; those of a query sum to {low:.3g} … {high:.3g}"
        why = f"in {one.location} the attention weights are {how} after softmax{sums}"
        return _failed(
            one, why, "Multiply v with the output of softmax itself; to sharpen attention, scale the scores."
        )
    if unclear is not None:
        return Finding.skip(ID, f"{unclear}: whether that is the design was not judged")
    return Finding(ID, Verdict.PASS, 0.0, 0.0, "the values are multiplied with the output of softmax")


def _failed(one: Seen, why: str, remedy: str) -> Finding:
    evidence = {"layer": one.layer, "operations": list(one.attention.changes), "cause": why}
    return Finding(ID, Verdict.FAIL, None, None, why, remedy, evidence)


def _ops(changes: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(changes))


def _aligned(one: Seen) -> tuple[Tensor, Tensor] | None:
    """(softmax's output, what multiplied v), in one layout; None where the layouts cannot be matched."""
    weights, used = one.attention.weights, one.attention.contracted
    if used is None or used.shape[-2:] != weights.shape[-2:] or used.numel() != weights.numel():
        return None
    used = used.double()
    orders = [weights, weights.transpose(0, 1)] if weights.dim() == 4 else [weights]  # the batch or the heads first
    ways = [order.reshape(used.shape).double() for order in orders]
    return max(ways, key=lambda way: float((way * used).sum())), used


def _proportional(weights: Tensor, used: Tensor) -> bool:
    """Whether each query's weights are softmax's times one number, where they are not 0."""
    kept = (used.abs() > 0) & (weights > 1e-12)
    ratio = torch.where(kept, used / weights.clamp(min=1e-12), torch.nan)
    low, high = (torch.where(kept, ratio, end) for end in (torch.inf, -torch.inf))
    least, most = low.amin(-1), high.amax(-1)
    some = kept.sum(-1) > 1
    return bool(((most - least)[some] <= SAME * most[some].abs()).all())


def _exponent(weights: Tensor, used: Tensor) -> float | None:
    """p where each query's weights are softmax's to the power p, times one number; None where they are not."""
    kept = (used > 1e-12) & (weights > 1e-12)
    x, y = (_centred(torch.where(kept, t.clamp(min=1e-12).log(), 0.0), kept) for t in (weights, used))
    slope = float((x * y).sum() / x.square().sum().clamp(min=1e-300))
    left = float((y - slope * x).norm() / y.norm().clamp(min=1e-300))
    return slope if left < 1e-2 else None


def _centred(values: Tensor, kept: Tensor) -> Tensor:
    mean = values.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(kept, values - mean, 0.0)
