"""The optimizers of a run, learning-rate schedules, gradient clipping, and averages of weights.

`config.optimizer` says which parameters an optimizer updates.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from glassformer.config.optimizer import rule_for
from glassformer.training import accelerate
from glassformer.training.muon import Muon
from glassformer.training.run import Optim, Schedule

HELD_ROWS, HELD_FROM = "held_rows", "held_from"
"""Attributes of a model (names of tables, each with the first of its last rows that no step changes) and of a table."""


class Optimizer:
    """AdamW, or Muon together with AdamW, as one optimizer. Learning rates are set per step as factor * peak."""

    def __init__(self, model: nn.Module, optim: Optim):
        named = dict(trained(model))
        rules = {name: rule_for(name) for name in named}
        match optim.kind:
            case "adamw":
                muon = {}
            case "muon":
                muon = {n: p for n, p in named.items() if rules[n].matrix}
            case _:
                assert_never(optim.kind)
        adam = {n: p for n, p in named.items() if n not in muon}
        self.members: list[tuple[torch.optim.Optimizer, float]] = []
        groups = [
            {"params": [p for n, p in adam.items() if rules[n].decayed], "weight_decay": optim.weight_decay},
            {"params": [p for n, p in adam.items() if not rules[n].decayed], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        device = next(iter(named.values())).device
        self.on_gpu = device.type == "cuda"
        betas = (optim.beta1, optim.beta2)
        # fused: one kernel over all parameters, on CPU and CUDA alike; capturable: a CUDA graph can hold the step
        kernel = {"fused": device.type in ("cpu", "cuda"), "capturable": device.type == "cuda"}
        if groups:
            adamw = torch.optim.AdamW(groups, lr=_rate(optim.lr, device), betas=betas, **kernel)
            self.members.append((adamw, optim.lr))
        if muon:
            rate = _rate(optim.muon_lr, device)
            self.members.append((Muon(muon.values(), rate, optim.momentum, optim.weight_decay), optim.muon_lr))
        self.names = {id(p): n for n, p in named.items()}
        for name, first in getattr(model, HELD_ROWS, {}).items():
            if name in named:
                setattr(named[name], HELD_FROM, first)
        for member, _ in self.members:
            _hold_rows(member)

    def step(self, factor: float) -> None:
        self.set_rate(factor)
        self.step_unless(None)

    def rates(self, factor: float) -> dict[str, float]:
        """Return the learning rates of a step by the names of their fields: `lr` of AdamW, `muon_lr` of Muon."""
        names = {torch.optim.AdamW: "lr", Muon: "muon_lr"}
        return {names[type(member)]: factor * peak for member, peak in self.members}

    def set_rate(self, factor: float) -> None:
        """Set the learning rates of the next step. On CUDA they are tensors, which a captured step reads."""
        for member, peak in self.members:
            for group in member.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(peak * factor)
                else:
                    group["lr"] = peak * factor

    def step_unless(self, found_inf: Tensor | None, shrink: Tensor | None = None) -> None:
        """Do a step unless the tensor `found_inf` is 1. The decision is made on the device.

        `shrink` multiplies the gradient while the optimizers read it, so no extra pass is needed.
        """
        for member, _ in self.members:
            if self.on_gpu and isinstance(member, torch.optim.AdamW) and (kernel := accelerate.adamw_kernel(member)):
                kernel.step(member, found_inf, shrink)
                continue
            member.grad_scale = None if shrink is None else 1 / shrink  # type: ignore[attr-defined]
            member.found_inf = found_inf  # type: ignore[attr-defined]
            member.step()
            member.found_inf = member.grad_scale = None  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        for member, _ in self.members:
            member.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor of every optimizer under `parameter/key`: plain tensors, no pickle."""
        out: dict[str, Tensor] = {}
        for member, _ in self.members:
            for parameter, held in member.state.items():
                for key, value in held.items():
                    out[f"{self.names[id(parameter)]}/{key}"] = torch.as_tensor(value)
        return out

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, one tensor after the other. Raise ValueError if one belongs to no parameter."""
        keys: dict[str, list[str]] = {}
        for full in tensors:
            owner, _, key = full.rpartition("/")
            keys.setdefault(owner, []).append(key)
        for member, _ in self.members:
            for group in member.param_groups:
                for parameter in group["params"]:
                    name = self.names[id(parameter)]
                    held = {key: tensors[f"{name}/{key}"] for key in keys.pop(name, [])}
                    # a fused kernel reads the step counter through its address: on a GPU it must not be on the CPU
                    read_there = group.get("fused") or group.get("capturable")
                    member.state[parameter] = {
                        key: value.to(parameter.device if key != "step" or read_there else "cpu", copy=True)
                        for key, value in held.items()
                    }
        left = sorted(f"{owner}/{key}" for owner, held in keys.items() for key in held)
        if left:
            raise ValueError(
                f"the optimizer state holds {left[0]} and {len(left) - 1} more that belong to no parameter."
            )


def _hold_rows(member: torch.optim.Optimizer) -> None:
    """Keep the values of held rows in each step: weight decay would change them without a gradient."""
    tables = [p for group in member.param_groups for p in group["params"] if _held_rows(p) is not None]
    kept: list[Tensor] = []

    def before(*_: Any) -> None:
        kept[:] = [rows.clone() for p in tables if (rows := _held_rows(p)) is not None]

    def after(*_: Any) -> None:
        for parameter, values in zip(tables, kept, strict=True):
            rows = _held_rows(parameter)
            assert rows is not None
            rows.copy_(values)

    if tables:
        member.register_step_pre_hook(before)
        member.register_step_post_hook(after)


def _held_rows(parameter: nn.Parameter, gradient: bool = False) -> Tensor | None:
    """Return the held rows of a table or of its gradient, or those that this rank has; None if it has no held rows."""
    first = getattr(parameter, HELD_FROM, None)
    tensor: Any = parameter.grad if gradient else parameter.detach()
    if first is None or tensor is None:
        return None
    if hasattr(tensor, "to_local"):  # divided among ranks by rows: each has as many as the first, or what is left
        mesh = tensor.device_mesh
        first -= mesh.get_local_rank() * -(-tensor.shape[0] // mesh.size())
        tensor = tensor.to_local()
    rows: Tensor = tensor[max(0, first) :]
    return rows


def _rate(value: float, device: torch.device) -> float | Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device) if device.type == "cuda" else value


def clear_held_rows(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradient of rows that no step changes to zero."""
    for parameter in parameters:
        if (rows := _held_rows(parameter, gradient=True)) is not None:
            rows.zero_()


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm of the whole gradient; NaN or infinite if any part of it is.

    The gradient of rows that no step changes is set to zero before.
    """
    clear_held_rows(parameters)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip(parameters: list[nn.Parameter], norm: Tensor, limit: float | None) -> None:
    """Scale the gradient down to the norm `limit` if it is larger. The norm must be finite."""
    if limit is None or (norm.device.type == "cpu" and float(norm) + 1e-6 <= limit):
        return  # torch would multiply every gradient by exactly 1
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


class DeadGradient(ArithmeticError):  # noqa: N818
    """Every gradient is exactly zero although there is something to learn. One sentence."""


def require_gradient(step: int, loss: float, norm: float) -> None:
    """Raise DeadGradient if the loss is above zero and every gradient is exactly zero: a kernel or compiler lost it."""
    if norm == 0 and loss > 1e-2:
        raise DeadGradient(
            f"step {step} has a loss of {loss:.4f} and a gradient of exactly zero, so nothing can be learnt: "
            "train with machine.compile='no', and report it with the output of `glass env`."
        )


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor on the peak learning rate at `step`, 0 <= step < steps.

    Warm-up is linear and ends at 1 on step `warmup`: (step + 1) / (warmup + 1). Then
    constant: 1;
    cosine:   floor + (1 - floor) (1 + cos(pi p)) / 2, p the fraction of the steps after the warm-up that are done;
    wsd:      1, then over the last fraction `decay` of all steps a linear decay to the floor.
    """
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    match schedule.kind:
        case "constant":
            return 1.0
        case "cosine":
            done = (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup)
            return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        case "wsd":
            start = max(schedule.warmup, round(steps * (1 - schedule.decay)))
            done = max(0.0, (step - start) / max(1, steps - 1 - start))
            return 1 - (1 - schedule.floor) * min(1.0, done)
        case _:
            assert_never(schedule.kind)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters of a model that are not frozen."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


class Average:
    """Moving average of the weights: a += (1 - decay_t) (w - a), with decay_t = min(decay, (1 + t) / (10 + t))."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in trained(model)}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        keep = min(self.decay, (1 + step) / (10 + step))
        names, values = zip(*trained(model), strict=True)
        averages = [self.weights[name] for name in names]
        torch._foreach_lerp_(averages, [v.detach() for v in values], 1 - keep)

    def swap(self, model: nn.Module) -> None:
        """Exchange the weights of the model with the averages. A second call restores them."""
        with torch.no_grad():
            for name, p in trained(model):
                held = p.detach().clone()
                p.copy_(self.weights[name])
                self.weights[name].copy_(held)


@contextlib.contextmanager
def evaluating(model: nn.Module, average: Average | None) -> Iterator[None]:
    """Put the model into evaluation mode, with the averaged weights if there are any; restore both at the end."""
    if average is not None:
        average.swap(model)
    model.eval()
    try:
        yield
    finally:
        model.train()
        if average is not None:
            average.swap(model)
