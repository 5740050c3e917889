"""Compare a subject with a trusted model: differences that only a reference shows, such as the rotary pairing."""

import copy
import re
from collections.abc import Iterator

from glassformer.doctor.compare.errors import CannotCompareError
from glassformer.doctor.compare.result import Comparison
from glassformer.doctor.compare.run import compare_subjects
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

ID = "reference/logits"
BY_LOCATION = {
    "q": "rope_relative", "k": "rope_relative", "v": "rope_values", "mask": "over_mask", "scores": "attn_scale",
    "pattern": "softmax_axis", "weights": "attention_weights", "heads": "head_layout", "merged": "head_layout",
    "post": "activation", "embed": "position_missing",
}  # fmt: skip
"""The diagnosis for an unexplained difference, by where it begins; elsewhere, norms and residual connections."""


def against_reference(subject: Subject, reference: Subject | None) -> Iterator[Finding]:
    """Compare the logits with those of the reference on the same weights, and explain the first difference."""
    if reference is None:
        return
    tokens = subject.tokens(2, min(subject.length(17), reference.length(17)), seed=61)
    try:
        trusted = _same_weights(subject, reference)
        result = compare_subjects(trusted, subject, tokens)
    except CannotCompareError as error:
        yield Finding.skip(ID, str(error))
        return
    (measured,) = result.measured
    difference = measured.exact if measured.exact is not None else measured.own
    if result.same:
        yield Finding(ID, Verdict.PASS, difference, measured.bound, measured.why)
    elif result.convention == "weights" and trusted is reference:
        yield Finding.skip(ID, f"the reference has other weights: {_explained(result)}")
    else:
        cause = _explained(result)
        known = result.depths is not None or result.convention not in (None, "unknown", "shape")
        evidence = {"layer": _layer(result), "difference": difference, "cause": cause, "first_difference": known}
        remedy = "Follow the reference there, or load weights that were made for this convention."
        id = f"{_diagnosis(result)}/reference"
        yield Finding(id, Verdict.FAIL, difference, measured.bound, cause, remedy, evidence)


def _same_weights(subject: Subject, reference: Subject) -> Subject:
    """Return the reference with the subject's weights if names and shapes are the same, else unchanged."""
    if subject.module is None or reference.module is None or reference.in_place:
        return reference
    mine, theirs = subject.module.state_dict(), reference.module.state_dict()
    if {k: v.shape for k, v in mine.items()} != {k: v.shape for k, v in theirs.items()}:
        return reference
    model = copy.deepcopy(reference.module)
    model.load_state_dict(mine)
    return Subject(**{**vars(reference), "model": model})


def _diagnosis(result: Comparison) -> str:
    if result.depths is not None:  # a layer runs again, or one does not run and gets no gradient
        return "layer_reuse" if result.depths[1] > result.depths[0] else "dead_gradient"
    if result.convention == "weights":  # both hold the same ones, so one reads those of another layer
        return "layer_reuse"
    known = None if result.explanation is None else result.explanation.diagnosis
    return known or BY_LOCATION.get((result.first or "").rpartition(".")[2], "norm_placement")


def _explained(result: Comparison) -> str:
    if result.explanation is None:
        return "; ".join(result.notes) or "the logits differ, and no operation could be compared"
    return f"at {result.first}: {result.explanation.with_names('the reference', 'the model')}"


def _layer(result: Comparison) -> int | None:
    found = re.search(r"blocks\.(\d+)\.", result.first or "")
    return int(found[1]) if found else None
