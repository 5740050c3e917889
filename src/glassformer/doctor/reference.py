"""Differences that only a trusted model shows: rotary pairing, grouped heads, norms of q and k, activations."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from glassformer.anatomy.scores import hidden_keys
from glassformer.anatomy.trace import TracedAttention
from glassformer.doctor.probes.activation import found_activations
from glassformer.doctor.probes.rotation import rotation_of
from glassformer.doctor.probes.step import vectors
from glassformer.doctor.subject.measure import CROSS_WHY, cross_shape_bound, gap, rms
from glassformer.doctor.subject.rounding import prefix_noise
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict


def against_reference(subject: Subject, reference: Subject | None) -> Iterator[Finding]:
    """Logits against the reference's on the same weights; where they differ, the first attention in which they part."""
    if reference is None:
        return
    other = _same_weights(subject, reference)
    tokens = subject.tokens(2, min(subject.length(17), reference.length(17)), seed=61)
    with subject.patient(subject.warmth) as mine, other.patient(subject.warmth) as theirs:
        a, b = mine.logits(tokens), theirs.logits(tokens)
        if a.shape != b.shape:
            yield Finding.skip("reference/logits", f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
            return
        bound = cross_shape_bound(b, prefix_noise(theirs, tokens)) + 1e-5 * rms(b)
        difference = gap(a, b)
        if difference <= bound:
            yield Finding("reference/logits", Verdict.PASS, difference, bound, CROSS_WHY)
            return
        cause, why, layer = _first_part(mine, theirs, tokens)
    evidence = {"layer": layer, "difference": difference, "cause": why}
    yield Finding(
        f"{cause}/reference", Verdict.FAIL, difference, bound, why, "Do as the reference does there.", evidence
    )


def _same_weights(subject: Subject, reference: Subject) -> Subject:
    """The reference with the subject's weights, where names and shapes are the same; else as it is."""
    if subject.module is None or reference.module is None or reference.in_place:
        return reference
    mine, theirs = subject.module.state_dict(), reference.module.state_dict()
    if {k: v.shape for k, v in mine.items()} != {k: v.shape for k, v in theirs.items()}:
        return reference
    model = copy.deepcopy(reference.module)
    model.load_state_dict(mine)
    return Subject(**{**vars(reference), "model": model})


def _first_part(mine: Subject, theirs: Subject, tokens: Tensor) -> tuple[str, str, int | None]:
    one, two = trace_call(mine, tokens), trace_call(theirs, tokens)
    blocks = mine.blocks()
    for a, b in zip(one.attentions, two.attentions, strict=False):
        found = _part(a, b, len(tokens))
        if found is not None:
            at = layer_of(a.path, blocks)
            return found[0], found[1], at[1] if at else None
    acts, others = found_activations(mine), found_activations(theirs)
    for (layer, name), (_, other) in zip(acts.items(), others.items(), strict=False):
        if name != other:
            number = int(layer.rpartition(".")[2])
            return "activation", f"layer {number} applies {name}, the reference {other}", number
    return (
        "norm_placement",
        "attention agrees up to where the stream differs: look at norms, feed-forward and head",
        None,
    )


def _part(a: TracedAttention, b: TracedAttention, rows: int) -> tuple[str, str] | None:
    mine, theirs = vectors(a, rows), vectors(b, rows)
    if mine is None or theirs is None or mine[0].shape != theirs[0].shape:
        return None
    for name, x, y in zip(("q", "k", "v"), mine, theirs, strict=True):
        if gap(x, y) <= 1e-4 * rms(y):
            continue
        if name != "q" and _same_heads(x, y):
            return "head_layout", f"{name} holds the same heads in another order (grouped heads repeated or tiled)"
        if name == "v":
            return "norm_placement", "v differs: another input or another projection"
        turn, turn2 = rotation_of(x[0, 0]), rotation_of(y[0, 0])
        same_length = abs(rms(x) - rms(y)) <= 1e-4 * rms(y)
        if turn.pairing != turn2.pairing or same_length:
            return "rope_pairing", f"{name} has the same lengths and another rotation: the other pairing of components"
        return (
            "rope_relative",
            f"{name} differs before the scores: its norm and its rotation in another order, or other angles",
        )
    if abs(a.scale / b.scale - 1) > 1e-3:
        return "attn_scale", f"scores are scaled by {a.scale:.4g}, in the reference by {b.scale:.4g}"
    if a.scores.shape == b.scores.shape and not torch.equal(hidden_keys(a.scores), hidden_keys(b.scores)):
        return "over_mask", "other keys are hidden"
    return None


def _same_heads(x: Tensor, y: Tensor) -> bool:
    """Whether each head of x is some head of y, not all at their own place."""
    distances = (x[:, :, None] - y[:, None]).abs().amax(dim=(0, 3, 4))
    return bool((distances.amin(1) <= 1e-4 * rms(y)).all())
