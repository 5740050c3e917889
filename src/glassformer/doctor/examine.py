"""The examination: every probe in its order, each on a fresh copy, none able to stop the others."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from glassformer.anatomy.scores import as_heads, hidden_keys
from glassformer.doctor.probes import (
    activation,
    attention,
    batching,
    blocks,
    caching,
    causality,
    decoding,
    gradients,
    layout,
    learning,
    masking,
    modes,
    norms,
    positions,
    reach,
    relative,
    scores,
    training,
    weighting,
    weights,
)
from glassformer.doctor.probes.structure import additions, initial, placement, precision, reuse, tables, targets
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.doctor.reference import against_reference
from glassformer.doctor.subject.errors import CannotExamineError, Unsupported
from glassformer.doctor.subject.isolate import WARM, quiet
from glassformer.doctor.subject.selection import continuous_length
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

NEAR_UNIFORM = 0.8
"""Entropy of attention over that of a uniform one; above it, weights are warmed."""

Step = tuple[str, Callable[[Subject], Finding | Iterable[Finding]]]
Found = Callable[[Finding, str], None]
"""Called with each finding as it is made, and the family of its probe."""


@dataclass
class Examination:
    """Findings so far, and what was learned on the way."""

    subject: Subject
    reference: Subject | None = None
    deep: bool = False
    quick: bool = False
    found: Found | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, finding: Finding, family: str) -> None:
        self.findings.append(finding)
        if self.found is not None:
            self.found(finding, family)

    def failed(self, name: str) -> bool:
        return any(f.id.startswith(name) and f.verdict is Verdict.FAIL for f in self.findings)


def steps(exam: Examination) -> list[tuple[str, list[Step]]]:
    """The probes by family, in the order in which failures explain later ones."""
    causal = exam.subject.kind != "encoder"
    structure = _structure(exam.subject)
    attention_steps: list[Step] = [
        ("attention", _attention),
        ("attention weights", weighting.used_as_they_are),
        *([("large scores", scores.masks_hold)] if causal else []),
        ("reach", reach.past_by_gradient),
    ]
    found: list[tuple[str, list[Step]]] = [
        ("modes", [("state", modes.nothing_is_remembered), ("dropout", modes.training_is_random)]),
        ("batch", [("norm axis", norms.each_token_by_itself), ("batch", batching.batch_invariance)]),
        ("causality", [("future", causality.future_token), ("gradient", reach.future_by_gradient)] if causal else []),
        ("train and eval", [("modes", modes.train_equals_eval)]),
        ("structure", structure["structure"]),
        ("attention", attention_steps),
        ("blocks", [("wiring", blocks.wiring), ("eps", norms.eps_as_declared), ("growth", blocks.residual_growth)]),
        ("placement", [*placement.PROBES]),
        ("activation", [("activation", activation.as_declared)]),
        ("positions", [("positions", _positions)]),
        (
            "cache",
            [("cache", caching.cache_equals_recomputation), ("crop", caching.rollback), ("reorder", caching.reorder)],
        ),
        ("padding", [("nan", masking.nothing_is_nan), ("padding", masking.padding_is_invisible)]),
        ("generate", [("generate", decoding.greedy_is_greedy)]),
        ("weights", [("tying", weights.tying), ("registered", weights.registered), ("state dict", weights.round_trip)]),
        ("tables", structure["tables"]),
        ("start", [("initial loss", weights.initial_loss), *structure["start"]]),
        ("gradients", [("gradients", gradients.reach_every_parameter)]),
        ("loss", [("label shift", training.label_shift), *structure["loss"]]),
    ]
    if exam.quick:
        found = [(n, [step for step in inner if step[0] in QUICK[n]]) for n, inner in found if n in QUICK]
    if exam.reference is not None:
        found.append(("reference", [("reference", lambda s: against_reference(s, exam.reference))]))
    if exam.deep:
        found.append(("training", [("overfit", learning.overfits_one_batch), ("entropy", learning.below_entropy)]))
    return found


def _structure(subject: Subject) -> dict[str, list[Step]]:
    """Probes of one recorded forward pass, which is made when the first of them needs it."""
    seen = functools.cache(lambda: recorded(subject))
    return {
        "structure": [
            ("layers", lambda s: reuse.weights_of_its_own(s, seen())),
            ("position sum", lambda s: additions.positions_added_once(s, seen())),
            ("softmax dtype", lambda s: precision.softmax_in_own_dtype(s, seen())),
        ],
        "tables": [("tables", lambda s: tables.shared_tables(s, seen()))],
        "start": [
            ("output projections", lambda s: initial.output_projections(s, seen())),
            ("head", lambda s: initial.head(s, seen())),
        ],
        "loss": [("every id", targets.every_id_counts), ("padding labels", targets.padding_labels)],
    }


FAMILIES = (
    *("modes", "batch", "causality", "train and eval", "structure", "attention", "blocks", "placement", "activation"),
    *("positions", "cache", "padding", "generate", "weights", "tables", "start", "gradients", "loss"),
    *("reference", "training"),
)
"""In the order of the examination; the last two are made when asked for."""
BETWEEN_LENGTHS = ("cache", "padding", "generate", "loss")
"""Families that compare results of inputs of different lengths."""
SELECTS = (
    "it keeps the best keys of each query by top-k, which jumps where scores are close, or as many tokens as an expert "
    "has capacity for: results of different lengths (cache, padding) were compared up to {} tokens, which are all kept."
)
QUICK = {
    "modes": ("state",),
    "batch": ("norm axis", "batch"),
    "causality": ("future",),
    "structure": ("layers", "position sum", "softmax dtype"),
    "attention": ("attention", "attention weights"),
    "positions": ("positions",),
    "cache": ("cache",),
    "padding": ("padding",),
    "weights": ("tying",),
    "gradients": ("gradients",),
    "loss": ("label shift",),
}
"""The probes of a quick examination, by family. It also uses fewer and shorter inputs, so that what shows only after
position 64, in training mode or in half precision is not looked for."""


def _attention(subject: Subject) -> Iterator[Finding]:
    short = attention.traced(subject)
    yield attention.scale(subject, short)
    yield attention.softmax_axis(subject, short)
    yield layout.head_layout(subject, short)
    yield from masking.padding_constant(subject)
    if subject.kind == "encoder":
        yield from attention.masks(subject, attention.traced(subject, length=subject.lengths()[-1]))
        return
    yield attention.mask_constant(short) if short else Finding.skip("mask_value/constant", attention.NOTHING)
    for seen in (short, attention.traced(subject, length=subject.lengths()[-1])):
        found = [f for f in attention.masks(subject, seen) if not f.id.startswith("mask_value")]
        yield from found
        if any(f.verdict is Verdict.FAIL for f in found):
            return


def _positions(subject: Subject) -> Iterator[Finding]:
    constant = positions.repeated_token(subject)
    yield from positions.positions_are_used(subject, constant)
    yield from relative.relative_positions(subject, constant)


def warmth(subject: Subject) -> float:
    """6 where attention is almost uniform, 1 where it is sharp already or warming breaks the numbers."""
    if subject.module is None:
        return 1.0
    with contextlib.suppress(Exception), quiet():
        seen = attention.traced(subject)
        sharp = [_evenness(one) for one in seen]
        if sharp and min(sharp) < NEAR_UNIFORM:
            return 1.0
        if not sharp and not blocks.is_fresh(subject.module):
            return 1.0
        with subject.isolated(WARM) as isolated:
            if bool(torch.isfinite(isolated.logits(isolated.tokens(2, isolated.length(24)))).all()):
                return WARM
    return 1.0


def _evenness(one: attention.Seen) -> float:
    """Mean over queries of entropy over its largest value, ln of the visible keys."""
    weights_ = as_heads(one.attention.weights, one.scores.shape[0])
    if weights_ is None:
        return 1.0
    w = weights_.double().clamp(min=1e-30)
    visible = (~hidden_keys(one.scores)).sum(-1).clamp(min=1)
    entropy = -(w * w.log()).sum(-1)
    many = visible > 3
    return float((entropy[many] / visible[many].double().log()).mean()) if bool(many.any()) else 1.0


def run(exam: Examination, tell: Callable[[str, int, int], None] | None = None) -> Examination:
    """Make every probe. `tell(family, done, of)` is called before each."""
    subject = exam.subject
    subject.brief = subject.brief or exam.quick
    families = steps(exam)
    total = sum(len(inner) for _, inner in families) + 1
    if tell:
        tell("eval mode", 0, total)
    for finding in guard("eval_stochastic/repeat", modes.eval_is_deterministic, subject):
        drops = finding.id == "eval_stochastic/repeat" and finding.verdict is Verdict.FAIL
        exam.add(_muted(exam, finding) if drops else finding, "modes")
    subject.warmth = warmth(subject)
    subject.continuous = continuous_length(subject)
    if subject.continuous is not None:
        exam.notes.append(SELECTS.format(subject.continuous))
    done = 1
    for family, inner in families:
        examined = subject.between_lengths() if family in BETWEEN_LENGTHS else subject
        for name, probe in inner:
            if tell:
                tell(f"{family}: {name}", done, total)
            for finding in guard(f"{family}/{name}", probe, examined):
                exam.add(finding, family)
            done += 1
        if family == "modes":
            subject.repeats = not exam.failed("state_leak") and not exam.failed("eval_stochastic")
            subject.copies.sharing = not exam.failed("state_leak")
    if tell:
        tell("done", total, total)
    return exam


def _muted(exam: Examination, finding: Finding) -> Finding:
    """The model is random in eval mode: by a declared seed that is not set, or by dropout, or otherwise.

    The other probes are made with that seed, or with dropout as identity; it is the cause if the model then repeats.
    """
    seeds = [name for name, value in exam.subject.facts.raw.items() if "seed" in name.lower() and value is None]
    exam.subject.seeded = bool(seeds)
    if seeds and modes.eval_is_deterministic(exam.subject).passed:
        why = f"it draws random numbers unless its config gives {seeds[0]}: the other probes were made with one seed"
        return replace(finding, verdict=Verdict.SKIP, why=why, remedy="", evidence={"explained": True})
    exam.subject.seeded = False
    exam.subject.mute = True
    if not modes.eval_is_deterministic(exam.subject).passed:
        return finding
    exam.notes.append("it drops in eval mode; the other probes were made with dropout as identity.")
    return replace(finding, id="eval_stochastic/dropout")


def guard(id: str, probe: Callable[[Subject], Any], subject: Subject) -> Iterator[Finding]:
    """A probe's findings as it makes them; what breaks inside the subject, or cannot be done, becomes a SKIP."""
    source: Iterator[Finding] | None = None
    while True:
        try:
            with quiet():
                if source is None:
                    result = probe(subject)
                    source = iter([result] if isinstance(result, Finding) else result)
                finding = next(source, None)
        except Unsupported as error:
            yield Finding.skip(id, str(error))
            return
        except CannotExamineError as error:
            if "took more than" in str(error):
                raise
            yield Finding.skip(id, str(error))
            return
        except (Exception, SystemExit) as error:
            yield Finding.skip(id, f"it stopped with {type(error).__name__}: {' '.join(str(error).split())[:160]}")
            return
        if finding is None:
            return
        if not (finding.passed and finding.measured is not None and math.isnan(finding.measured)):
            yield finding
