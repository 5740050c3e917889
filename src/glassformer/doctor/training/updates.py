"""What the optimizer does: which parameters it has, whether they move, whether the loss falls, what is resumed."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.doctor.subject.measure import gap, many
from glassformer.doctor.training.listen import Update, listen
from glassformer.doctor.training.pipeline import Pipeline
from glassformer.finding import Finding, Verdict

STEPS = 20
"""Updates on one batch."""
WARM_UP = 3
"""Updates within which a learning rate may still be 0."""
Checkpoint = tuple[Callable[[], Any], Callable[[Any], None]]
"""A function that returns the state of the pipeline, and one that restores it."""


def coverage(pipeline: Pipeline) -> Iterator[Finding]:
    """The optimizer has every trainable parameter of the model, and no others."""
    if pipeline.optimizer is None:
        yield Finding.skip("optimizer_coverage/missing", "no optimizer was found: give optimizer=")
        return
    held = {id(p) for group in pipeline.optimizer.param_groups for p in group["params"]}
    own = dict(pipeline.model.named_parameters())
    missing = [n for n, p in own.items() if p.requires_grad and id(p) not in held]
    remedy = f"Give the optimizer all parameters: {', '.join(missing[:3])} {'...' if len(missing) > 3 else ''}".strip()
    why = f"trainable parameters that the optimizer does not have, of {len(own)}"
    yield Finding.judge("optimizer_coverage/missing", len(missing), 0.0, why, remedy, names=missing[:8])
    strangers = len(held - {id(p) for p in own.values()})
    why = "parameters of the optimizer that are not the model's"
    remedy = "Build the optimizer after the model has its final parameters (after .to(), adapters, resized embeddings)."
    yield Finding.judge("optimizer_coverage/strangers", strangers, 0.0, why, remedy)
    frozen = [n for n, p in own.items() if not p.requires_grad and id(p) in held]
    why = "parameters that the optimizer has and that are frozen (requires_grad is False)"
    remedy = f"Train them or leave them out: {', '.join(frozen[:3])}."
    yield Finding.judge("frozen_parameters/held", len(frozen), 0.0, why, remedy, names=frozen[:8])
    trainable = [n for n, p in own.items() if p.requires_grad]
    why = "the model has a parameter that can be trained"
    yield Finding.judge("frozen_parameters/all", float(not trainable), 0.0, why, "Set requires_grad on a parameter.")


def gradients(update: Update, pipeline: Pipeline) -> Iterator[Finding]:
    """Gradients are finite, begin at zero for each update, and reach the optimizer's parameters."""
    bad = [n for n, g in {**update.arrived, **update.used}.items() if not bool(torch.isfinite(g).all())]
    why = "parameters with a gradient that is NaN or infinite"
    remedy = "Look for a softmax over masked rows, a division by zero targets, or float16 without loss scaling."
    yield Finding.judge("non_finite/gradients", len(bad), 0.0, why, remedy, names=bad[:8])
    trainable = [n for n, p in pipeline.model.named_parameters() if p.requires_grad]
    silent = [n for n in trainable if n not in update.arrived]
    why = f"trainable parameters that get no gradient, of {len(trainable)}"
    if update.arrived and silent:
        yield Finding.skip("missing_gradient/arrive", f"{many(len(silent), 'parameter')} ({silent[0]}): `gf.diagnose`")
    else:
        remedy = "Call loss.backward() on a loss that was not detached, outside torch.no_grad()."
        yield Finding.judge("missing_gradient/arrive", len(silent), 0.0, why, remedy)


def moves(pipeline: Pipeline, batch: Any) -> Iterator[Finding]:
    """Weights change within three updates, and each update begins with gradients of zero."""
    if pipeline.optimizer is None:
        return
    rates: list[float] = []
    stale: list[str] = []
    stepped = False
    with pipeline.restored():
        before = {n: p.detach().clone() for n, p in pipeline.model.named_parameters() if p.requires_grad}
        for number in range(WARM_UP):
            update = listen(pipeline, batch)
            stepped, rates = stepped or update.stepped, rates + update.rates
            stale = update.stale if number else stale
            if not update.stepped:
                break
        after = dict(pipeline.model.named_parameters())
        still = [n for n, p in before.items() if torch.equal(p, after[n].detach())]
    why = "optimizer.step() runs"
    yield Finding.judge("no_update/optimizer", float(not stepped), 0.0, why, "Call optimizer.step() after backward.")
    why = "parameters that have a gradient at the beginning of an update"
    remedy = "Call optimizer.zero_grad() once per update."
    yield Finding.judge("stale_gradients/begin", len(stale), 0.0, why, remedy, names=stale[:8])
    if not stepped:
        return
    zero = all(rate == 0 for rate in rates)
    why = f"the learning rate of an update is above 0 within the first {WARM_UP}"
    remedy = "Set lr, or let the warm-up begin above 0; call scheduler.step() once per update."
    yield Finding.judge("zero_learning_rate/rate", float(zero), 0.0, why, remedy, rates=rates[:6])
    if not zero:
        held = {id(p) for group in pipeline.optimizer.param_groups for p in group["params"]}
        still = [n for n in still if id(after[n]) in held and n in update.arrived and bool(update.arrived[n].any())]
        why = f"parameters with a gradient that do not change in {WARM_UP} updates"
        remedy = "Look for a learning rate of 0 in their group, or an update too small for their dtype."
        yield Finding.judge("no_update/weights", len(still), 0.0, why, remedy, names=still[:8])


def learns(pipeline: Pipeline, batch: Any, steps: int = STEPS) -> Finding:
    """The loss of one batch falls when it is trained on alone."""
    losses: list[float] = []
    with pipeline.restored():
        for _ in range(steps):
            update = listen(pipeline, batch)
            if pipeline.optimizer is not None and not update.stepped:
                return Finding.skip("no_learning/one-batch", "the optimizer does not run")
            losses.append(update.loss())
            if not math.isfinite(losses[-1]):
                break
    first, last = losses[0], losses[-1]
    evidence = {"first": round(first, 4), "last": round(last, 4), "updates": len(losses)}
    if not math.isfinite(last) or last > first + max(0.5, 0.2 * first):
        why = f"the loss of one batch grows from {first:.3g} to {last:.3g} in {many(len(losses), 'update')}"
        remedy = "Lower the learning rate, warm it up, and clip gradients."
        return Finding("divergence/one-batch", Verdict.FAIL, last, first, why, remedy, evidence)
    why = f"the loss of one batch falls in {many(len(losses), 'update')}"
    remedy = "Look at the other findings first; then at the sign of the update and the learning rate."
    found = Finding.judge("no_learning/one-batch", last, first * (1 - 1e-6), why, remedy, **evidence)
    return found


def modes(update: Update, model: nn.Module) -> Finding:
    """Training runs in train mode where dropout is declared."""
    id = "train_mode/dropout"
    drops = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    if not drops:
        return Finding.skip(id, "no dropout is declared")
    off = sum(not f.training for f in update.forwards)
    why = f"forward passes of training in eval mode, of {len(update.forwards)}: dropout is off there"
    return Finding.judge(id, off, 0.0, why, "Call model.train() before training, and again after each evaluation.")


def evaluation(pipeline: Pipeline, batch: Any, evaluate: Callable[[], Any] | None) -> Iterator[Finding]:
    """An evaluation runs in eval mode without changing weights, and training goes on in train mode."""
    if evaluate is None:
        return
    seen: list[bool] = []
    with pipeline.restored():
        before = [p.detach().clone() for p in pipeline.model.parameters()]
        handle = pipeline.model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
        try:
            evaluate()
        finally:
            handle.remove()
        changed = sum(not torch.equal(a, b) for a, b in zip(before, pipeline.model.parameters(), strict=True))
        after = modes(listen(pipeline, batch), pipeline.model)
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in pipeline.model.modules())
    why = f"forward passes of the evaluation in train mode, of {len(seen)}: dropout is on there"
    if drops and seen:
        yield Finding.judge("eval_mode/dropout", sum(seen), 0.0, why, "Call model.eval() before evaluating.")
    else:
        yield Finding.skip("eval_mode/dropout", "no dropout is declared" if seen else "it did not call the model")
    why = "parameters that the evaluation changes"
    yield Finding.judge("eval_mode/weights", changed, 0.0, why, "Evaluate without an optimizer, under torch.no_grad().")
    if after.verdict is Verdict.FAIL:
        why = "training after an evaluation runs in eval mode"
        yield Finding("train_mode/after-evaluation", Verdict.FAIL, after.measured, 0.0, why, after.remedy)


def resume(pipeline: Pipeline, batch: Any, checkpoint: Checkpoint | None) -> Iterator[Finding]:
    """An update after loading a checkpoint equals the update without the interruption."""
    if checkpoint is None:
        return
    save, load = checkpoint
    with pipeline.restored():
        for _ in range(2):
            listen(pipeline, batch)
        state = save()
        with pipeline.restored():
            listen(pipeline, batch)
            straight = {n: p.detach().clone() for n, p in pipeline.model.named_parameters()}
        for _ in range(2):  # training goes on meanwhile, so that nothing stays as it was by chance
            listen(pipeline, batch)
        load(state)
        listen(pipeline, batch)
        resumed: dict[str, Tensor] = {n: p.detach().clone() for n, p in pipeline.model.named_parameters()}
    names = [n for n, p in straight.items() if gap(p, resumed[n]) > 1e-5 * float(p.abs().max())]
    why = "parameters that differ after an update from a loaded checkpoint and without it"
    remedy = "Save and load the optimizer's state, the schedule and the step, in addition to the weights."
    yield Finding.judge("resume/update", len(names), 0.0, why, remedy, names=names[:8])
