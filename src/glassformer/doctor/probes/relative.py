"""Relative schemes: only distances matter, values carry no position, and the rotation is the declared one.

A shift of all positions is a symmetry only where positions enter through attention scores alone. That holds if a
repeated token gives the same logits at every position. Recurrences, convolutions, pooled blocks and attention sinks
count from the start of the sequence, and a temperature by position scales the scores: there shifts are not judged.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from glassformer.anatomy.scores import hidden_keys
from glassformer.doctor.probes.attention import Seen
from glassformer.doctor.probes.positions import Constant, scheme
from glassformer.doctor.probes.rotation import Rotation, lengths, rotation_of
from glassformer.doctor.probes.step import vectors
from glassformer.doctor.subject.measure import RELATIVE, SHIFT_BOUND, SHIFT_WHY, cross_shape_bound, gap, rms, ulp
from glassformer.doctor.subject.rounding import Measured, judge, prefix_noise
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

SHIFT = 37


def relative_positions(subject: Subject, constant: Constant) -> Iterator[Finding]:
    """In a relative scheme only distances matter; q, k and v of the first layer show what breaks it."""
    kind = scheme(subject, constant)
    if subject.facts.capacity is not None:
        yield Finding.skip("rope_relative/shift", "experts with a capacity: a repeated token finds its expert full")
        return
    if kind not in RELATIVE or constant.absolute:
        yield Finding.skip("rope_relative/shift", "positions are not relative, so a shift may move logits")
        return
    if subject.facts.raw.get("bias_rounded"):
        yield Finding.skip("rope_relative/shift", "the bias of each position is rounded by design, so shifts move it")
        return
    values = _values_move(constant)
    if values is not None:
        yield values
    rotations = _rotations(subject, constant) if kind == "rotary" else []
    if any(_scaled_by_position(one) for one in constant.steady()):
        yield Finding.skip("rope_relative/shift", TEMPERATURE)
        yield from _as_declared(subject, rotations)
        return
    shifts = _shifts(subject) if values is not None or _symmetric(constant) else [_no_symmetry(subject)]
    found = [f for f in (_toeplitz(constant, kind), *shifts) if f is not None]
    failed = next((f for f in found if f.verdict is Verdict.FAIL), None)
    if failed is not None and values is None and kind == "rotary":
        yield _one_sided(rotations, failed) or _mixed_pairing(rotations, failed) or failed
    elif failed is not None and values is None:
        yield failed
    else:
        yield from found
    if kind == "rotary" and failed is None:
        yield from _as_declared(subject, rotations)


TEMPERATURE = (
    "queries or keys are multiplied by a factor that depends on the position (a temperature): scores depend on more "
    "than the distance by design"
)


def _symmetric(constant: Constant) -> bool:
    """Whether a repeated token gives the same logits at every position."""
    logits = constant.logits
    if logits is None:
        return False
    bound = max(1e-4, 40 * ulp(logits.dtype)) * rms(logits)
    return gap(logits, logits[:, :1].expand_as(logits)) <= bound


def _no_symmetry(subject: Subject) -> Finding | None:
    if subject.interface.positions is None:
        return None
    why = (
        "logits of a repeated token differ from position to position although its values do not: something counts from "
        "the start of the sequence (a recurrence, a convolution, a sink), so a shift of all positions may move logits"
    )
    return Finding.skip("rope_relative/shift", why)


def _scaled_by_position(one: Seen) -> bool:
    """Whether q or k changes its length with the position and turns in pairs otherwise (or not at all)."""
    parts = vectors(one.attention, 2)
    if parts is None:
        return False
    for x in (parts[0][0, 0], parts[1][0, 0]):
        turn = rotation_of(x, dtype=one.coarsest)
        longer = float((lengths(x) - 1).abs().max()) > max(1e-4, 8 * ulp(one.coarsest))
        if longer and (turn.pairing is not None or not turn.moves):
            return True
    return False


def _values_move(constant: Constant) -> Finding | None:
    """Values of a repeated token that differ far from the start too: a convolution over values moves only its start."""
    for one in constant.steady():
        parts = vectors(one.attention, 2)
        if parts is None:
            continue
        v = parts[2][0]
        far = v[:, v.shape[1] // 2 :]
        moved = gap(far, far[:, :1].expand_as(far))
        if moved > 1e-3 * rms(v) and constant.absolute is not True:
            return Finding(
                "rope_values/repeated-token",
                Verdict.FAIL,
                moved,
                1e-3 * rms(v),
                "values of a repeated token differ from position to position although the stream does not",
                "Rotate q and k, not v.",
                {"layer": one.layer},
            )
    return None


def _toeplitz(constant: Constant, kind: str) -> Finding | None:
    """Scores of a repeated token, less the query's own: a function of the distance alone (a shift per row cancels)."""
    worst_gap, where = 0.0, None
    for one in constant.steady():
        scores, hidden = one.scores[0].double(), hidden_keys(one.scores)[0]
        own = torch.diagonal(scores, dim1=-2, dim2=-1)[..., None]
        own_hidden = torch.diagonal(hidden, dim1=-2, dim2=-1)[..., None]  # a selection of keys may leave it out
        relative = torch.where(hidden | own_hidden, torch.nan, scores - own)
        # a layer without positions has nothing but rounding here, so its scores set the scale too
        size = max(rms(relative[~relative.isnan()]), rms(scores[~hidden]) * 0.02, 1e-12)
        length = scores.shape[-1]
        for distance in (1, 2, 5, 11, 23):
            if distance < length:
                line = torch.diagonal(relative, offset=-distance, dim1=-2, dim2=-1)
                line = line[:, ~line.isnan().any(0)]
                if line.shape[-1] > 1:
                    off = float((line - line[:, :1]).abs().max()) / size
                    if off > worst_gap:
                        worst_gap, where = off, one
    if where is None:
        return None
    # float32 angles at 129 positions: 129 times 6e-8, over scores that vary by a thousandth of their size. In half
    # precision an ulp of a query is more than that.
    bound = max(2e-3, 40 * ulp(where.coarsest))
    remedy = "q and k must be rotated alike, by their own positions, with the same angles."
    evidence = {"layer": where.layer, "scheme": kind}
    why = "scores of a repeated token depend on the distance alone"
    return Finding.judge("rope_relative/distance", worst_gap, bound, why, remedy, **evidence)


def _shifts(subject: Subject) -> list[Finding]:
    if subject.interface.positions is None:
        return []
    remedy = "Logits move when all positions shift: q and k are not rotated alike, or angles lose precision far out."

    def by(offset: int, length: int) -> Any:
        def measure(isolated: Subject) -> Measured:
            tokens = isolated.tokens(2, length, seed=12)
            positions = torch.arange(length, device=tokens.device).expand(2, -1)
            given = {"source": isolated.source(2)} if isolated.kind == "seq2seq" else {}
            base = isolated.logits(tokens, positions=positions, **given)
            moved = isolated.logits(tokens, positions=positions + offset, **given)
            floor = max(SHIFT_BOUND, 40 * offset * 6e-8) * rms(base)
            bound = max(floor, cross_shape_bound(base, prefix_noise(isolated, tokens, **given)))
            return Measured(gap(base, moved), bound, SHIFT_WHY, {"offset": offset})

        return measure

    limit = subject.facts.whole("max_len") or subject.limit
    length = min(24, max(4, limit - SHIFT - 1), subject.limit)
    found = []
    for offset in sorted({min(SHIFT, limit - length), min(2000, limit - length)}):
        if offset > 0:
            with contextlib.suppress(IndexError, RuntimeError):
                if _changes_with_the_longest(subject, length, offset):
                    found.append(Finding.skip(f"rope_relative/shift-{offset}", LONGEST))
                    continue
                found.append(judge(subject, f"rope_relative/shift-{offset}", by(offset, length), remedy))
    return found


LONGEST = (
    "the largest position of a sequence changes the rotation of all its tokens (scaling for long contexts), so a shift "
    "of all positions may move logits"
)


def _changes_with_the_longest(subject: Subject, length: int, offset: int) -> bool:
    """Whether a causal model's logits move when only the last token, which they do not see, gets a later position."""
    if subject.kind != "decoder" or length < 2:
        return False
    tokens = subject.tokens(2, length, seed=12)
    near = torch.arange(length, device=tokens.device).expand(2, -1)
    far = near.clone()
    far[:, -1] += offset
    base, moved = (subject.logits(tokens, positions=positions)[:, :-1] for positions in (near, far))
    return gap(base, moved) > max(SHIFT_BOUND, 40 * offset * 6e-8) * rms(base)


def _rotations(subject: Subject, constant: Constant) -> list[tuple[Seen, Rotation, Rotation]]:
    found = []
    for one in constant.steady():
        parts = vectors(one.attention, 2)
        if parts is not None:
            fraction = declared_fraction(subject, one.layer or 0)
            q, k = (rotation_of(part[0, 0], fraction, one.coarsest) for part in parts[:2])
            found.append((one, q, k))
    return found


def _one_sided(rotations: list[tuple[Seen, Rotation, Rotation]], failed: Finding) -> Finding | None:
    """Queries are rotated and keys are not, or the other way round."""
    for one, q, k in rotations:
        if q.moves != k.moves:
            why = f"in {one.location} {'q' if q.moves else 'k'} is rotated and {'k' if q.moves else 'q'} is not"
            remedy = "Rotate q and k both, each by its own position, with the same angles."
            return Finding(
                "rope_relative/one-sided",
                Verdict.FAIL,
                failed.measured,
                failed.bound,
                why,
                remedy,
                {"layer": one.layer},
            )
    return None


def _mixed_pairing(rotations: list[tuple[Seen, Rotation, Rotation]], failed: Finding) -> Finding | None:
    for one, q, k in rotations:
        if q.moves and k.moves and (q.pairing is None or k.pairing is None or q.pairing != k.pairing):
            why = (
                "the rotation keeps the length of no pair, neither (i, i + d/2) nor (2i, 2i + 1): angles laid out for "
                "one pairing, components taken by the other"
                if q.pairing is None or k.pairing is None
                else f"q is rotated in {q.pairing} pairs, k in {k.pairing} ones"
            )
            remedy = (
                "Use one layout: cos/sin as θ0 θ1 … θ0 θ1 … with rotate-half, or θ0 θ0 θ1 θ1 … with adjacent pairs."
            )
            return Finding(
                "rope_pairing/mixed", Verdict.FAIL, failed.measured, failed.bound, why, remedy, {"layer": one.layer}
            )
    return None


def _as_declared(subject: Subject, rotations: list[tuple[Seen, Rotation, Rotation]]) -> Iterator[Finding]:
    """Pairing and base against the config. Frequencies are judged only where no scaling is declared."""
    for one, q, _ in rotations[:1]:
        declared = subject.facts.rope_pairing
        if q.pairing is not None and declared is not None:
            wanted = (
                "interleaved"
                if declared is True or "inter" in str(declared) or "adj" in str(declared) or "gptj" in str(declared)
                else "halves"
            )
            id, why = "rope_pairing/declared", f"components are rotated in {q.pairing} pairs; declared: {wanted}"
            verdict = Verdict.PASS if q.pairing == wanted else Verdict.FAIL
            yield Finding(
                id,
                verdict,
                None,
                None,
                why,
                f"Rotate {wanted} pairs, as the checkpoint was trained.",
                {"layer": one.layer},
            )
    for one, q, _ in rotations:
        base = declared_base(subject, one.layer or 0)
        fraction = declared_fraction(subject, one.layer or 0)
        if fraction is not None and int(fraction * one.attention.q.shape[-1]) % 2:
            continue  # an odd number of components: which exponents belong to it is not agreed on
        if base is None or q.pairing is None or len(q.angles) < 2 or not float(q.angles[1]) > 0:
            continue
        expected = torch.tensor([base ** (-2 * i / q.width) for i in range(len(q.angles))], dtype=torch.float64)
        # an angle is read off vectors of the model's precision, to some ulps: small ones say little in half precision
        coarse = ulp(one.coarsest)
        large = expected > max(1e-3, 300 * coarse)
        if not bool(large.any()):
            continue
        off = float((q.angles[large] / expected[large] - 1).abs().max())
        measured = float(q.angles[1]) ** (-q.width / 2)
        why = f"angles per position are those of base {measured:.4g}; declared {base:.4g}"
        remedy = "Make the frequencies from the declared base: θ_i = base^(-2i/d)."
        finding = Finding.judge(
            "rope_relative/base", off, max(1e-2, 30 * coarse), why, remedy, layer=one.layer, measured_base=measured
        )
        if not finding.passed or one is rotations[-1][0]:
            yield finding
            return


def declared_fraction(subject: Subject, layer: int = 0) -> float | None:
    """The fraction of a head that the config says is rotated in a layer; None where it says nothing."""
    declared = subject.facts.number("rope_fraction")
    inner = _of_layer(subject, subject.facts.raw.get("rope_parameters"), layer)
    value = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    return declared or (float(value) if isinstance(value, int | float) else None)


def _of_layer(subject: Subject, table: Any, layer: int) -> Any:
    """The part of a table that holds for a layer, where there is one for each type of layer."""
    kinds = subject.facts.raw.get("layer_types")
    if isinstance(table, dict) and isinstance(kinds, list | tuple) and layer < len(kinds):
        return table.get(kinds[layer], table)
    return table


def declared_base(subject: Subject, layer: int = 0) -> float | None:
    """The rotary base the config names for a layer, None where a scaling changes what it means."""
    raw = subject.facts.raw
    bases = raw.get("rope_bases")
    if isinstance(bases, list) and layer < len(bases):
        return bases[layer]
    inner = _of_layer(subject, raw.get("rope_parameters") or raw.get("rope_scaling"), layer)
    if isinstance(inner, dict):
        if inner.get("rope_type", inner.get("type", "default")) != "default":
            return None
        if isinstance(inner.get("rope_theta"), int | float):
            return float(inner["rope_theta"])
    elif inner is not None:
        return None
    return subject.facts.number("rope_base")
