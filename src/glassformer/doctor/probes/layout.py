"""Splitting and merging heads keeps each token's numbers together.

In a causal model the test is by numbers and asks nothing of the layout: tokens after a cut are replaced. Where the
maps of an attention still read the same rows up to the cut, and its q, k or v there differ, the split has mixed tokens;
where q, k, v and the weights there are the same, and what the output map reads differs, the merge has. An encoder's
rows all move, so there the numbers of each row are looked up among its token's heads.
"""

import torch
from torch import Tensor, nn

from glassformer.anatomy.scores import as_heads
from glassformer.anatomy.trace import Trace
from glassformer.doctor.probes.attention import Seen, look
from glassformer.doctor.probes.step import vectors
from glassformer.doctor.subject.measure import gap, rms
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict

ID = "head_layout/tokens"
UNKNOWN = "heads are not joined by views alone, so their layout was not compared"


def head_layout(subject: Subject, seen: list[Seen], rows: int = 2, length: int = 23) -> Finding:
    """Whether a token's row holds other tokens' numbers, in the first layer where it does."""
    if subject.kind == "encoder":
        found = [(one, _looked_up(one, rows)) for one in seen]
    else:
        found = _by_numbers(subject, rows, subject.length(length))
    for one, mixed in found:
        if mixed:
            return Finding(
                ID,
                Verdict.FAIL,
                1.0,
                0.0,
                f"in {one.location} the heads are {mixed} without a transpose: a row holds other tokens' numbers",
                "transpose(1, 2) between (B,H,T,K) and (B,T,H·K), on the way in and on the way out.",
                {"layer": one.layer, "where": mixed, "path": one.attention.path},
            )
    if all(mixed is None for _, mixed in found):
        return Finding.skip(ID, UNKNOWN)
    return Finding(ID, Verdict.PASS, 0.0, 0.0, "each token's row holds its own heads and no others")


def _by_numbers(subject: Subject, rows: int, length: int) -> list[tuple[Seen, str | None]]:
    """Each self-attention with `split` or `merged` where it mixes, "" where it does not, None where it is unknown."""
    cut = length // 3
    with subject.isolated(subject.warmth) as isolated:
        tokens = isolated.tokens(rows, length, seed=5)
        changed = tokens.clone()
        changed[:, cut + 1 :] = isolated.other(tokens)[:, cut + 1 :]
        one, two = trace_call(isolated, tokens), trace_call(isolated, changed)
        blocks = isolated.blocks()
        pairs = zip(look(isolated, one, rows, length), look(isolated, two, rows, length), strict=False)
        found: list[tuple[Seen, str | None]] = []
        for a, b in pairs:
            if a.role != "self" or a.attention.path != b.attention.path:
                continue
            orders = _reads_the_same(a, one, two, rows, length, cut, blocks)
            if not orders:
                break  # what comes in is mixed already: not here
            assert one.logits is not None
            assert two.logits is not None
            if not _apart(one.logits[:, : cut + 1], two.logits[:, : cut + 1]):
                orders = ORDERS  # right in any order if what comes of it does not leak
            found.append((a, _mixes(a, b, rows, length, cut, orders)))
    return found


APART = 1e-3
"""Of the size: numbers of another token differ by their size, rounding (a maximum over masked scores) by far less."""


def _apart(a: Tensor, b: Tensor) -> bool:
    return gap(a, b) > APART * rms(a)


ORDERS = ("batch first", "time first")


def _of_tokens(values: Tensor, rows: int, length: int, order: str) -> Tensor | None:
    """(B,T,·) from (B·T,·) or (T·B,·), and from tensors of three axes, which show their order."""
    if values.dim() == 3:
        first = {(rows, length): ORDERS[0], (length, rows): ORDERS[1]}.get((values.shape[0], values.shape[1]))
        if first != order:
            return None
        return values if first == ORDERS[0] else values.transpose(0, 1)
    if values.dim() != 2 or len(values) != rows * length:
        return None
    return values.reshape(rows, length, -1) if order == ORDERS[0] else values.reshape(length, rows, -1).transpose(0, 1)


def _reads_the_same(
    one: Seen, first: Trace, second: Trace, rows: int, length: int, cut: int, blocks: dict[str, nn.Module]
) -> tuple[str, ...]:
    """The orders in which the maps of q and k read the same rows up to the cut in both runs; maps are paired in order.

    Tokens after the cut differ, so that one order fits: batch first, or time first as torch's own attention has it.
    """
    storages, layer = one.attention.maps, layer_of(one.attention.path, blocks)

    def inputs(trace: Trace, order: str) -> list[Tensor]:
        # of this layer: shared weights are used in several
        mine = [m for m in trace.linears if m.weight in storages and layer_of(m.path, blocks) == layer]
        seen = [_of_tokens(m.input, rows, length, order) for m in mine]
        return [s[:, : cut + 1] for s in seen if s is not None]

    found = []
    for order in ORDERS:
        a, b = inputs(first, order), inputs(second, order)
        if a and len(a) == len(b) and not any(_apart(x, y) for x, y in zip(a, b, strict=True)):
            found.append(order)
    return tuple(found)


def _mixes(a: Seen, b: Seen, rows: int, length: int, cut: int, orders: tuple[str, ...]) -> str | None:
    mine, theirs = vectors(a.attention, rows), vectors(b.attention, rows)
    if mine is None or theirs is None:
        return None
    known = [(x, y) for x, y in zip(mine, theirs, strict=True) if x.shape[-2] == y.shape[-2] == length]
    if any(_apart(x[:, :, : cut + 1], y[:, :, : cut + 1]) for x, y in known):
        return "split"
    weights, merged, others = as_heads(a.attention.weights, rows), a.attention.merged, b.attention.merged
    if len(known) < 3 or weights is None or merged is None or others is None:
        return None if len(known) < 3 else ""
    if bool((weights[:, :, : cut + 1, cut + 1 :] != 0).any()):
        return ""  # the future is seen: no matter of the layout
    pairs = [[_of_tokens(m, rows, length, order) for m in (merged, others)] for order in orders]
    apart = [_apart(x[:, : cut + 1], y[:, : cut + 1]) for x, y in pairs if x is not None and y is not None]
    return None if not apart else "merged" if all(apart) else ""


def _looked_up(one: Seen, rows: int) -> str | None:
    """For an encoder: whether the numbers of a row are those of its token's heads."""
    found = [("merged", _merge_mixes(one, rows)), ("split", _split_mixes(one, rows))]
    if all(mixed is None for _, mixed in found):
        return None
    return next((what for what, mixed in found if mixed), "")


def _merge_mixes(one: Seen, rows: int) -> bool | None:
    """None when it is unknown; else whether what the output map reads at a token is not that token's heads."""
    out, merged = one.attention.out, one.attention.merged
    if out is None or merged is None:
        return None
    heads = (out.reshape(rows, -1, *out.shape[-2:]) if out.dim() == 3 else out).to(merged.dtype)
    t = one.scores.shape[-2]
    if heads.dim() != 4 or heads.shape[1] == 1 or heads.shape[2] != t or merged.numel() != heads.numel():
        return None
    have = merged.reshape(rows * t, -1).sort(-1).values
    wants = [heads.permute(order).reshape(rows * t, -1).sort(-1).values for order in ((0, 2, 1, 3), (2, 0, 1, 3))]
    return wants[0].shape == have.shape and not any(torch.equal(want, have) for want in wants)


def _split_mixes(one: Seen, rows: int) -> bool | None:
    """Whether v of a token holds numbers that its projection did not give."""
    v, linear = one.attention.v, one.attention.v_linear
    if v is None or linear is None:
        return None
    v = v.reshape(rows, -1, *v.shape[-2:]) if v.dim() == 3 else v
    if v.dim() != 4 or linear.numel() % (rows * v.shape[2]) or v.shape[2] != one.scores.shape[-1]:
        return None
    t = v.shape[2]
    have, middle = v.permute(0, 2, 1, 3).reshape(rows, t, -1), t // 2
    owns = (linear.reshape(rows, t, -1), linear.reshape(t, rows, -1).transpose(0, 1))
    return not any(bool(torch.isin(have[0, middle], own[0, middle]).all()) for own in owns)
