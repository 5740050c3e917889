"""`diagnose`: examine a subject, sort causes from consequences, find the location, write it up."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassformer.doctor.causes import name_of, sort_out
from glassformer.doctor.examine import Examination, Found, run
from glassformer.doctor.locate import layer_of_fault
from glassformer.doctor.probes import causality
from glassformer.doctor.probes.attention import open_layers, traced
from glassformer.doctor.probes.structure.constant import constant_logits
from glassformer.doctor.report import TITLES, Diagnosis, Report
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.device import device_name
from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.isolate import preserved, quiet, time_limit
from glassformer.doctor.subject.subject import Kind, Subject
from glassformer.finding import Finding, Verdict
from glassformer.weights.folder import non_finite


def diagnose(
    subject: Any,
    kind: Kind | None = None,
    reference: Any = None,
    vocab_size: int | None = None,
    expect: Mapping[str, Any] | None = None,
    deep: bool = False,
    quick: bool = False,
    seconds: float | None = None,
    tell: Callable[[str, int, int], None] | None = None,
    name: str | None = None,
    found: Found | None = None,
    device: str | torch.device | None = None,
) -> Report:
    """Examine any model: ours, Hugging Face's, a plain module, a callable from tokens to logits, or a folder.

    kind        "decoder", "encoder" or "seq2seq"; default: inferred from the model and stated in the report
    reference   a trusted model of the same weights: shows what only a comparison can (pairing, order of heads)
    expect      declared intent that the config does not say, such as {"sliding_window": 128, "prefix": 16}
    deep        train a little too: overfit one batch, and a source of known entropy
    seconds     time limit of the whole examination, in any thread
    tell        called before each probe: tell(what, done, of)
    device      "cpu", "cuda", "cuda:1" or "mps": examine a copy of the model there; default: where the model is
    found       called with each finding as it is made: found(finding, family); what it raises ends the examination

    The model given is not changed: probes run on copies. One that is over 1 GB or cannot be copied faithfully is
    examined in place and restored after each probe.
    Raises CannotExamineError, one sentence, when it cannot be examined at all.

    >>> gf.diagnose(gf.load("bard"), quick=True).healthy
    True
    """
    began = time.monotonic()
    if isinstance(subject, str | Path):
        from glassformer.weights import load

        name = name or str(subject)
        subject = load(subject)
    with preserved(subject), time_limit(seconds, "the examination"):
        if isinstance(subject, nn.Module) and (problem := non_finite(subject)) is not None:
            raise CannotExamineError(f"{problem}, and so is all that is computed with them: load or train it again.")
        examined = subject_of(subject, kind, vocab_size, expect, name, device)
        if (constant := constant_logits(examined)) is not None:
            notes = [f"the other probes were not made: {constant.why}"]
            return _report(
                Examination(examined, found=found, findings=[constant], notes=notes), time.monotonic() - began
            )
        trusted = None
        if reference is not None:
            trusted = subject_of(reference, examined.kind, vocab_size, expect, "reference", device)
        exam = run(Examination(examined, trusted, deep, quick, found), tell)
        return _report(exam, time.monotonic() - began)


def _report(exam: Examination, seconds: float) -> Report:
    subject, pictures = exam.subject, dict[str, Any]()
    diagnoses = []
    for group, explained in sort_out(exam.findings):
        diagnosis = name_of(group[0])
        location = _location(subject, group)
        if "layer" not in location and (layer := layer_of_fault(subject, group)) is not None:
            location["layer"] = layer
        if diagnosis == "causal_leak":
            if any(f.id != "causal_leak/train-mode" for f in group):
                location |= _attention_maps(subject, group[0].evidence.get("length", 24))
            with contextlib.suppress(Exception), quiet(), subject.isolated(subject.warmth) as isolated:
                pictures["leak"] = causality.leak_matrix(isolated, isolated.length(12)).tolist()
        evidence = tuple(group)
        diagnoses.append(Diagnosis(diagnosis, TITLES[diagnosis], location, evidence, group[0].remedy, tuple(explained)))
    findings, where = tuple(exam.findings), str(subject.device)
    return Report(subject.name, subject.kind, tuple(diagnoses), findings, _notes(exam), seconds, pictures, where)


def _location(subject: Subject, group: list[Finding]) -> dict[str, Any]:
    """Layer, heads, position and row, as the probes met them."""
    location: dict[str, Any] = {}
    for finding in group:
        for name, key in (
            ("layer", "layer"),
            ("heads", "heads"),
            ("position", "first_bad"),
            ("row", "row"),
            ("module", "module"),
        ):
            if finding.evidence.get(key) is not None and name not in location:
                location[name] = finding.evidence[key]
    return location


def _attention_maps(subject: Subject, length: int) -> dict[str, Any]:
    """Whether a leak goes through attention: masks missing, or masks there and the leak elsewhere."""
    with contextlib.suppress(Exception), quiet():
        open_ = open_layers(traced(subject, length=length))
        words = f"unmasked in layers {open_}" if open_ else "masked everywhere: the leak lies outside attention"
        return {"attention": words}
    return {}


def _notes(exam: Examination) -> tuple[str, ...]:
    """What could not be examined, and real findings that are not bugs, once each."""
    notes = [*exam.subject.notes, *exam.notes]
    if exam.subject.device.type != "cpu":
        notes.insert(0, f"examined on {device_name(exam.subject.device)}.")
    for finding in exam.findings:
        if finding.verdict is Verdict.SKIP:
            what = "found, not a bug" if finding.evidence.get("explained") else "not examined"
            notes.append(f"{finding.id} ({what}): {finding.why}")
    return tuple(dict.fromkeys(notes))
