"""A mask holds however large scores become: queries and keys scaled up, forbidden positions must stay at exactly zero.

A mask constant of -10,000 is as good as any while scores are small. Training makes them large, and one score below the
constant makes the future the best key. So the maps that q and k come from, recognised in a trace, are multiplied until
scores reach what a mask has to stand.
"""

import torch
from torch import Tensor

from glassformer.anatomy.record import storage_of
from glassformer.anatomy.scores import hidden_keys
from glassformer.doctor.probes.attention import MASK_CONSTANT, NOTHING
from glassformer.doctor.probes.causality import block_outputs, declared_prefix, layer_number, moved_by_future
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.measure import gap, same_shape_bound
from glassformer.doctor.subject.rounding import Measured, first_over, judge
from glassformer.doctor.subject.subject import Subject
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding

REACH = 0.5 * abs(MASK_CONSTANT)
"""Scores are made this large, 5e5: trained ones of 1.1e5 have been met, and a constant must lie below -1e6. Fresh
scores of about 5 get there when the maps of q and of k are multiplied by 300."""
REMEDY = "Mask with -inf or torch.finfo(dtype).min: a finite constant is reached by trained scores."


def masks_hold(subject: Subject) -> Finding:
    """The leak probe with q and k scaled up. Only where nothing leaks before: else it is no matter of the constant."""
    id = "mask_value/large-scores"
    if subject.module is None:
        return Finding.skip(id, "not a module, so its queries and keys cannot be scaled")
    with subject.isolated(subject.warmth) as isolated:
        if _leaks(isolated).ratio > 1:
            return Finding.skip(id, "it leaks with its own weights already")

    def measure(isolated: Subject) -> Measured:
        enlarge(isolated)
        return _leaks(isolated)

    return judge(subject, id, measure, REMEDY, warm=False, own=True)


def enlarge(isolated: Subject) -> float:
    """Multiply the maps that q and k come from; returns the factor."""
    assert isolated.module is not None
    trace = trace_call(isolated, isolated.tokens(2, isolated.length(23), seed=5))
    if not trace.attentions:
        raise Unsupported(NOTHING)
    plain = [a for a in trace.attentions if a.maps and not a.normed]
    if not plain:
        raise Unsupported("q and k are normed, or come from no linear map: weights do not make scores large")
    top = max(float(torch.where(hidden_keys(a.scores), 0.0, a.scores).abs().max()) for a in plain)
    factor = max(1.0, (REACH / max(top, 1e-30)) ** 0.5)
    storages = frozenset[int]().union(*(a.maps for a in plain))
    for parameter in isolated.module.parameters():
        if parameter.dim() >= 2 and storage_of(parameter) in storages:
            parameter.mul_(factor)
    return factor


def _leaks(isolated: Subject) -> Measured:
    length, prefix = isolated.length(24), declared_prefix(isolated)
    found = []
    cuts = (3, length - 2) if isolated.large else (3, 10, length - 2)
    for one in moved_by_future(isolated, isolated.rows(2), length, prefix, cuts):
        if not bool(torch.isfinite(torch.tensor(one.gap))):
            raise Unsupported("its logits are not all numbers with scores so large")
        found.append(one)
    worst = first_over(found)
    if worst.ratio > 1:
        worst.evidence["layer"] = layer_number(_first_block(isolated, int(worst.evidence["cut"]), length), isolated)
    return worst


def _first_block(isolated: Subject, cut: int, length: int) -> str | None:
    tokens = isolated.tokens(2, length, seed=length)
    changed = tokens.clone()
    changed[:, cut + 1 :] = isolated.other(tokens)[:, cut + 1 :]
    one, two = block_outputs(isolated, tokens), block_outputs(isolated, changed)
    for name, a in one.items():
        if a.dim() == 3 and a.shape[1] == length and name in two and _apart(a, two[name], cut):
            return name
    return None


def _apart(a: Tensor, b: Tensor, cut: int) -> bool:
    return gap(a[:, : cut + 1], b[:, : cut + 1]) > same_shape_bound(a)
