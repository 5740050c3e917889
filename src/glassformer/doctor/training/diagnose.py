"""`diagnose_training`: examine a training step, sort causes from consequences, and report."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from glassformer.doctor.causes import name_of
from glassformer.doctor.examine import guard
from glassformer.doctor.report import Diagnosis, Report
from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.isolate import time_limit
from glassformer.doctor.subject.subject import Kind
from glassformer.doctor.training import targets, tokens, updates
from glassformer.doctor.training.listen import Update, listen
from glassformer.doctor.training.pipeline import Optimizer, Pipeline, find_pipeline
from glassformer.finding import Finding, Verdict

TITLES = {
    "non_finite": "NaN or infinite gradients",
    "optimizer_coverage": "optimizer coverage: the optimizer does not have the model's parameters",
    "frozen_parameters": "frozen parameters: the optimizer has parameters that cannot change",
    "missing_gradient": "missing gradient: no gradient reaches the parameters",
    "no_update": "no update: the weights do not change",
    "zero_learning_rate": "learning rate of zero",
    "stale_gradients": "stale gradients: gradients of earlier updates are added",
    "label_shift": "label shift: the loss compares logits with the wrong tokens",
    "loss_padding": "padding in the loss: padding is a target, or in the denominator",
    "missing_mask": "missing mask: the model reads padding",
    "end_never_learned": "end of text never learned: it is masked like padding",
    "loss_scale": "loss scale: the gradient is a multiple of that of the mean loss",
    "accumulation_weights": "gradient accumulation: targets of short parts count more",
    "train_mode": "train mode: dropout is off while training",
    "eval_mode": "eval mode: an evaluation drops, or changes the weights",
    "resume": "resumed state: an update after a checkpoint differs",
    "tokenizer_mismatch": "tokenizer and model do not fit",
    "packing_leak": "leak between packed documents",
    "divergence": "divergence: the loss of one batch grows",
    "no_learning": "no learning: the loss of one batch does not fall",
}
"""Headline of each diagnosis of a pipeline, causes before what they cause."""
LEARNING = ("no_learning", "divergence")
EXPLAINS = {
    "non_finite": (*LEARNING, "no_update", "resume"),
    "optimizer_coverage": ("no_update", *LEARNING),
    "frozen_parameters": ("missing_gradient", "no_update", *LEARNING),
    "missing_gradient": ("no_update", *LEARNING),
    "no_update": LEARNING,
    "zero_learning_rate": ("no_update", *LEARNING),
    "stale_gradients": LEARNING,
    "loss_scale": LEARNING,
}
"""cause -> what follows from it and is not listed as a diagnosis of its own."""
MINIMUM = 5
"""Probes that must have been made before a report without a diagnosis reads "healthy"."""


def diagnose_training(
    step: Any,
    batch: Any,
    *,
    model: Any = None,
    optimizer: Optimizer | None = None,
    tokenizer: Any = None,
    kind: Kind = "decoder",
    evaluate: Callable[[], Any] | None = None,
    checkpoint: updates.Checkpoint | None = None,
    seconds: float | None = None,
) -> Report:
    """Examine a training pipeline on one batch, and report what is wrong with it.

    step        a function step(batch) that does one training step (loss, gradients, optimizer), or a trainer with
                `model` and `training_step(model, batch)`, such as transformers' Trainer
    batch       what `step` takes; it should have padding and unequal lengths if your data have
    model       the model, and `optimizer` its optimizer; default: found in what the step refers to
    tokenizer   the tokenizer; its ids of padding and of the end of a text are used
    kind        "decoder" (targets are the next tokens), "encoder" or "seq2seq"
    evaluate    a function that evaluates the model once: is it in eval mode, and training in train mode afterwards?
    checkpoint  (save, load): save() returns a state that load(state) restores; is a resumed update the same?
    seconds     time limit

    About 35 steps are made. Everything that the step refers to is restored: weights, gradients, optimizer, schedule,
    random state. Files that a step writes are not. Raises CannotExamineError if there is nothing to examine.

    >>> import torch
    >>> model = gf.build(gf.presets.nano(vocab_size=65), seed=0).train()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> def step(ids):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), ids).backward()  # the targets are not shifted
    ...     optimizer.step()
    >>> gf.diagnose_training(step, torch.randint(65, (4, 24))).diagnoses[0].id
    'label_shift'
    """
    began = time.monotonic()
    pipeline = find_pipeline(step, model, optimizer, tokenizer)
    with time_limit(seconds, "the examination"):
        try:
            with pipeline.restored():
                update = listen(pipeline, batch)
        except Exception as error:
            text = " ".join(str(error).split())[:200].rstrip(".")
            raise CannotExamineError(
                f"the step failed with {type(error).__name__}: {text}: give a batch that it takes."
            ) from None
        findings = list(_findings(pipeline, batch, update, kind, evaluate, checkpoint))
    return _report(pipeline, findings, update, time.monotonic() - began)


def _findings(
    pipeline: Pipeline, batch: Any, update: Update, kind: Kind, evaluate: Any, checkpoint: Any
) -> Iterator[Finding]:
    ids = tokens.special_ids(pipeline)
    probes: list[tuple[str, Callable[[Any], Finding | Iterable[Finding]]]] = [
        ("optimizer_coverage/optimizer", lambda _: updates.coverage(pipeline)),
        ("missing_gradient/gradients", lambda _: updates.gradients(update, pipeline)),
        ("label_shift/targets", lambda _: targets.label_shift(update, kind)),
        ("loss_padding/targets", lambda _: targets.padding_targets(update, ids["pad"])),
        ("missing_mask/left-padding", lambda _: targets.mask_given(update, ids["pad"])),
        ("end_never_learned/targets", lambda _: targets.end_is_learned(update, ids["eos"])),
        ("loss_scale/weights", lambda _: targets.weights(update)),
        ("train_mode/dropout", lambda _: updates.modes(update, pipeline.model)),
        ("tokenizer_mismatch/ids", lambda _: tokens.tokenizer_fits(pipeline, update)),
        ("packing_leak/documents", lambda _: _restored(pipeline, lambda: tokens.packed(pipeline, update))),
        ("no_update/updates", lambda _: updates.moves(pipeline, batch)),
        ("no_learning/one-batch", lambda _: updates.learns(pipeline, batch)),
        ("eval_mode/evaluation", lambda _: updates.evaluation(pipeline, batch, evaluate)),
        ("resume/update", lambda _: updates.resume(pipeline, batch, checkpoint)),
    ]
    for id, probe in probes:
        yield from guard(id, probe, None)  # type: ignore[arg-type]


def _restored(pipeline: Pipeline, probe: Callable[[], Finding]) -> Finding:
    with pipeline.restored():
        return probe()


def _report(pipeline: Pipeline, findings: list[Finding], update: Update, seconds: float) -> Report:
    failed = [f for f in findings if f.verdict is Verdict.FAIL]
    names = {name_of(f) for f in failed}
    caused = {effect for name in names for effect in EXPLAINS.get(name, ())}
    diagnoses = []
    for name, title in TITLES.items():
        group = tuple(f for f in failed if name_of(f) == name)
        if group and name not in caused:
            effects = tuple(f for f in failed if name_of(f) in EXPLAINS.get(name, ()))
            diagnoses.append(Diagnosis(name, title, {}, group, group[0].remedy, effects))
    notes = [f"{f.id} (not examined): {f.why}" for f in findings if f.verdict is Verdict.SKIP]
    if update.calls > 1 and update.stepped:
        notes.insert(0, f"the optimizer runs after {update.calls} steps: gradients are accumulated.")
    frozen = sum(not p.requires_grad for p in pipeline.model.parameters())
    if frozen:
        notes.insert(0, f"{frozen} parameters are frozen.")
    subject, kept = type(pipeline.model).__name__, tuple(dict.fromkeys(notes))
    where = str(next((p.device for p in pipeline.model.parameters()), "cpu"))
    return Report(subject, "training", tuple(diagnoses), tuple(findings), kept, seconds, {}, where, TITLES, MINIMUM)
