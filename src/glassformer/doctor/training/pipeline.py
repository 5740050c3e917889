"""The parts of a training pipeline: a function that does one step, its model, its optimizer and its tokenizer.

What the caller does not name is found in what the step refers to: the attributes of a trainer, the closure and the
global variables of a function, the arguments of a `functools.partial`.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.snapshot import Snapshot, referenced

Step = Callable[[Any], Any]


class Optimizer(Protocol):
    """What is read of an optimizer: one of torch.optim, or of `training.optimizers`."""

    param_groups: list[dict[str, Any]]

    def step(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass
class Pipeline:
    """What is examined. `step(batch)` does one training step."""

    step: Step
    model: nn.Module
    optimizer: Optimizer | None
    tokenizer: Any = None
    roots: tuple[Any, ...] = ()
    """Objects from which everything that a step changes can be reached."""

    def run(self, batch: Any) -> Any:
        """Do one step with a fixed random state, so that dropout is the same at each call."""
        torch.manual_seed(0)
        with torch.enable_grad():
            return self.step(dict(batch) if isinstance(batch, dict) else batch)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore weights, gradients, optimizer, schedule and random state afterwards."""
        snapshot = Snapshot(list(self.roots))
        states = [(m, m.training) for m in self.model.modules()]
        try:
            yield
        finally:
            snapshot.restore()
            for module, training in states:
                module.training = training


def find_pipeline(step: Any, model: Any = None, optimizer: Any = None, tokenizer: Any = None) -> Pipeline:
    """Find the parts. Raises CannotExamineError if there is no model, or nothing that does a step."""
    if isinstance(step, nn.Module) or not (callable(step) or _is_trainer(step)):
        raise CannotExamineError(
            f"{type(step).__name__} does no training step: give a function step(batch) that computes the loss, its "
            "gradients and the update, or a trainer."
        )
    roots = (step, *_globals(step), model, optimizer)
    things = list(referenced(list(roots)))
    if model is None:
        own = getattr(step, "model", None)
        model = own if isinstance(own, nn.Module) else _outermost([t for t in things if isinstance(t, nn.Module)])
    if model is None:
        raise CannotExamineError("the step refers to no model: give it as model=.")
    if optimizer is None:
        found = [t for t in things if isinstance(t, torch.optim.Optimizer)] or [t for t in things if _is_similar(t)]
        own = getattr(step, "optimizer", None)
        optimizer = own if isinstance(own, torch.optim.Optimizer) else found[0] if len(found) == 1 else None
    tokenizer = tokenizer or getattr(step, "processing_class", None) or getattr(step, "tokenizer", None)
    call: Step = step
    if _is_trainer(step):
        call, optimizer = _trainer_step(step, model, optimizer)
    return Pipeline(call, model, optimizer, tokenizer, (*roots, model, optimizer))


def _is_similar(thing: Any) -> bool:
    """Return whether an object has what is read of an optimizer, as those of this package do."""
    attributes = getattr(thing, "__dict__", None)
    return isinstance(attributes, dict) and "param_groups" in attributes and callable(getattr(thing, "step", None))


def _is_trainer(step: Any) -> bool:
    return callable(getattr(step, "training_step", None)) and isinstance(getattr(step, "model", None), nn.Module)


def _trainer_step(trainer: Any, model: nn.Module, optimizer: Any) -> tuple[Step, Any]:
    """Return a step of an object like transformers' Trainer: its training_step computes gradients only."""
    if optimizer is None and callable(getattr(trainer, "create_optimizer", None)):
        optimizer = trainer.create_optimizer() or trainer.optimizer
    schedule = getattr(trainer, "lr_scheduler", None)

    def step(batch: Any) -> Any:
        loss = trainer.training_step(model, batch)
        if optimizer is not None:
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        return loss

    return step, optimizer


def _globals(step: Any) -> list[Any]:
    """Return the global variables that a function names, and those of functions that it calls."""
    found: list[Any] = []
    waiting, seen = [step], set[int]()
    while waiting:
        function = waiting.pop()
        function = function.func if isinstance(function, functools.partial) else function
        function = function.__func__ if isinstance(function, types.MethodType) else function
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        named = [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
        found += [v for v in named if not isinstance(v, types.ModuleType | type)]
        waiting += [v for v in named if isinstance(v, types.FunctionType)]
    return found


def _outermost(modules: list[nn.Module]) -> nn.Module | None:
    """Return the module that is no part of another one; the largest, if there are several."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    outer = [m for m in modules if id(m) not in inner and any(True for _ in m.parameters())]
    return max(outer, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
