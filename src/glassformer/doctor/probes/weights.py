"""Weights: tied where declared, registered, the same after a round trip, and of the declared initial size."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.doctor.probes.blocks import is_fresh
from glassformer.doctor.subject.isolate import cast
from glassformer.doctor.subject.measure import gap, rms
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict

NOTE, ALARM = 0.3, 1.5
"""Nats above or below ln V at the start: T5 starts 0.74 above by design."""


def _tied(isolated: Subject) -> bool | None:
    """Whether the head's matrix is a token table, as a forward uses them; None when one of them is not seen."""
    trace = trace_call(isolated, isolated.tokens(1, isolated.length(4)))
    assert trace.logits is not None
    size = trace.logits.shape[-1]
    tables = {storage for storage, rows, _, _ in trace.lookups if rows == size}
    heads = [m.weight for m in trace.linears if m.output.shape[-1] == size]
    return heads[-1] in tables if tables and heads else None


def tying(subject: Subject) -> Finding:
    """Declared tying is one Parameter: in the model, its copy, after a reload, a cast and an optimiser step."""
    id = "weight_tying/same"
    declared = subject.facts.tied
    if subject.module is None or declared is None or not subject.vocabulary_logits:
        return Finding.skip(id, "nothing is declared about tying")
    own = _tied(subject)
    if own is None:
        return Finding.skip(id, "the token table or the head's matrix was not seen")
    remedy = "Make them one Parameter: head.weight = embedding.weight, after loading and after every conversion."
    if not declared:
        verdict = Verdict.FAIL if own else Verdict.PASS
        remedy = "Give the head its own matrix, or declare the tying."
        return Finding(id, verdict, why="the config declares an untied head", remedy=remedy)
    if not own:
        return Finding(
            id, Verdict.FAIL, 2.0, 1.0, "tying is declared, yet table and head are two tensors, not one", remedy
        )
    for what, still in _after_changes(subject):
        if still is False:
            why = f"table and head are one tensor at first and two after {what}"
            return Finding(id, Verdict.FAIL, 2.0, 1.0, why, remedy, {"after": what})
    return Finding(
        id, Verdict.PASS, 1.0, 1.0, "table and head are one tensor, also after copy, reload, cast and a step"
    )


def _after_changes(subject: Subject) -> Iterator[tuple[str, bool | None]]:
    with subject.isolated(own=True) as isolated:
        assert isolated.module is not None
        yield "a deep copy", _tied(isolated)
        state = {k: v.clone() for k, v in isolated.module.state_dict().items()}
        try:
            isolated.module.load_state_dict(state)
            yield "load_state_dict", _tied(isolated)
        except Exception:
            yield "load_state_dict", None
        with torch.enable_grad():
            isolated.logits(isolated.tokens(1, isolated.length(4))).square().mean().backward()
        with torch.no_grad():
            for parameter in isolated.module.parameters():  # torch.optim would import torch's compiler, for seconds
                if parameter.grad is not None:
                    parameter.sub_(1e-3 * parameter.grad)
        yield "an optimiser step", _tied(isolated)
        cast(isolated.module, torch.bfloat16)
        isolated.module.to(subject.dtype)
        yield "a cast", _tied(isolated)


def round_trip(subject: Subject) -> Finding:
    """A state dict carries everything: after loading it over other weights the logits are the same."""
    id = "dead_gradient/state-dict"
    if subject.module is None:
        return Finding.skip(id, "not a module")
    with subject.isolated(own=True) as isolated:
        assert isolated.module is not None
        tokens = isolated.tokens(2, isolated.length(9))
        base = isolated.logits(tokens)
        state = {k: v.clone() for k, v in isolated.module.state_dict().items()}
        with torch.no_grad():
            for parameter in isolated.module.parameters():
                parameter.add_(0.1)
        isolated.module.load_state_dict(state)
        off = gap(base, isolated.logits(tokens))
    remedy = "Register what is learned: self.x = nn.Parameter(...), nn.ModuleList for lists; check state_dict's keys."
    return Finding.judge(id, off, 1e-6 * rms(base), "a state dict loaded back gives the same logits", remedy)


def registered(subject: Subject) -> Finding:
    """Every module and parameter that an attribute holds, also inside lists, is registered."""
    check = "dead_gradient/registered"
    if subject.module is None:
        return Finding.skip(check, "not a module")
    known = {id(m) for m in subject.module.modules()} | {id(p) for p in subject.module.parameters()}
    for name, module in subject.module.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_"):
                continue
            for item in _inside(value):
                if id(item) not in known:
                    where = f"{name}.{key}" if name else key
                    kind = type(item).__name__
                    why = f"{where} holds a {kind} that is not registered: no optimiser, cast or state dict sees it"
                    remedy = (
                        "Keep modules in nn.ModuleList or nn.ModuleDict, tensors in nn.Parameter or register_buffer."
                    )
                    at = layer_of(name, subject.blocks())
                    evidence = {"layer": at[1] if at else None, "module": where}
                    return Finding(check, Verdict.FAIL, 1.0, 0.0, why, remedy, evidence)
    return Finding(check, Verdict.PASS, 0.0, 0.0, "every module and parameter in reach is registered")


def _inside(value: Any) -> Iterator[nn.Module | nn.Parameter]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else [value]
    for item in items:
        if isinstance(item, nn.Parameter) or (isinstance(item, nn.Module) and any(True for _ in item.parameters())):
            yield item


def initial_loss(subject: Subject) -> Finding:
    """Cross-entropy of random targets under fresh weights: ln V, and half the logits' variance above it."""
    id = "init_loss/ln-V"
    if subject.module is None or not subject.vocabulary_logits or not is_fresh(subject.module):
        return Finding.skip(id, "judged on fresh weights of a model with a vocabulary head")
    with subject.isolated() as isolated:
        tokens = isolated.tokens(isolated.rows(4, 2), isolated.length(24), seed=23)
        logits = isolated.logits(tokens).double()
    size = logits.shape[-1]
    targets = subject.tokens(len(tokens), tokens.shape[1], 24)
    loss = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    std = float(logits.std())
    why = f"first loss {loss:.3g} against ln {size} = {math.log(size):.3g}; logits have standard deviation {std:.2g}"
    remedy = (
        "Head or tied embedding starts too large (or a leak lets it know the answer): standard deviation 0.02 is usual."
    )
    off = abs(loss - math.log(size))
    if off > ALARM and subject.interface.library:
        note = f"{why}: its library starts the head so; train it from other initial weights, or load trained ones"
        return Finding(id, Verdict.SKIP, off, ALARM, note, "", {"explained": True, "std": std})
    if off > ALARM and abs(_without_own(logits, tokens) - math.log(size)) <= ALARM:
        note = f"{why}; all of it is the token's own logit (a tied table as large as its stream), which training undoes"
        return Finding(id, Verdict.SKIP, off, ALARM, note, "", {"explained": True, "std": std})
    return Finding.judge(
        id, off, ALARM, why + (f" (note: more than {NOTE} off)" if off > NOTE else ""), remedy, std=std, loss=loss
    )


def _without_own(logits: Tensor, tokens: Tensor) -> float:
    """The loss on random targets where the token that was read is left out, as a logit and as a target."""
    others = logits.scatter(-1, tokens[..., None].to(logits.device), -torch.inf)
    return float((others.logsumexp(-1) - others.where(others.isfinite(), 0).sum(-1) / (logits.shape[-1] - 1)).mean())
