"""The optimizers of a run, learning-rate schedules, gradient clipping, and averages of weights.

`config.optimizer` says which parameters an optimizer updates.
"""

import contextlib
import math
from collections import defaultdict
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
FUSED = ("cpu", "cuda")
"""Types of devices on which one kernel updates all parameters. A CUDA graph can hold it."""


class AdamW:
    """Moments m and v of the gradient, update m / (sqrt(v) + eps) without their bias, decoupled weight decay.

    The first optimizer of `torch.optim` imports torch's compiler: more than a second at the start of a run that
    compiles nothing. This class calls the operator that `torch.optim.AdamW(fused=True)` calls, so the bits are equal.
    The state has the same names, dtypes and devices, so checkpoints do not depend on which of the two wrote them.

    The learning rate of a group is a number, or a tensor on the device, which a CUDA graph reads in each replay.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float | Tensor, betas: tuple[float, float], eps: float = 1e-8):
        self.param_groups: list[dict[str, Any]] = []
        """Each with its parameters under `params`, and its `weight_decay`."""
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.on_gpu: bool = groups[0]["params"][0].is_cuda
        for group in groups:
            # the operator reads step counters on the device, `_one_by_one` on the CPU
            fused = group["params"][0].device.type in FUSED
            self.param_groups.append({**group, "lr": lr, "betas": betas, "eps": eps, "fused": fused})

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter. Its first step creates it."""
        held = self.state[parameter]
        if not held:
            device = parameter.device if group["fused"] else "cpu"
            held["step"] = torch.zeros((), dtype=torch.float32, device=device)
            held["exp_avg"], held["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return held

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None, shrink: Tensor | None = None) -> None:
        """Update all parameters that have a gradient, unless the tensor `found_inf` is 1.

        Gradients are multiplied by the tensor `shrink`. Both are read on the device, so that a CUDA graph can hold a
        step that is skipped or clipped.
        """
        if self.on_gpu and (kernel := accelerate.adamw_kernel(self)):
            kernel.step(self, found_inf, shrink)
            return
        scale = None if shrink is None else 1 / shrink
        for group in self.param_groups:
            update = _fused if group["fused"] else _one_by_one
            dtypes: dict[torch.dtype, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    dtypes.setdefault(p.dtype, []).append(p)
            for parameters in dtypes.values():
                update(parameters, [self.state_of(p, group) for p in parameters], group, found_inf, scale)


def _fused(
    parameters: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
    found_inf: Tensor | None,
    scale: Tensor | None,
) -> None:
    means, squares, steps = ([held[key] for held in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    gradients = [p.grad.to(p.dtype) for p in parameters if p.grad is not None]
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters, gradients, means, squares, [], steps, lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
        weight_decay=group["weight_decay"], amsgrad=False, maximize=False, grad_scale=scale, found_inf=found_inf,
    )  # fmt: skip
    if found_inf is not None:  # the operator changed nothing if it is 1: the count goes back
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _one_by_one(
    parameters: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
    found_inf: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Update one parameter after the other, so that temporaries are those of one (`sizing.step.temporaries`)."""
    if found_inf is not None and bool(found_inf):
        return
    beta1, beta2 = group["betas"]
    for p, held in zip(parameters, states, strict=True):
        assert p.grad is not None
        gradient = p.grad if scale is None else p.grad / scale
        held["step"] += 1
        count = float(held["step"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        held["exp_avg"].lerp_(gradient, 1 - beta1)
        held["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (held["exp_avg_sq"].sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
        p.addcdiv_(held["exp_avg"], root, value=-group["lr"] / (1 - beta1**count))


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
        self.members: list[tuple[AdamW | Muon, float]] = []
        groups = [
            {"params": [p for n, p in adam.items() if rules[n].decayed], "weight_decay": optim.weight_decay},
            {"params": [p for n, p in adam.items() if not rules[n].decayed], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        device = next(iter(named.values())).device
        if groups:
            adamw = AdamW(groups, _rate(optim.lr, device), (optim.beta1, optim.beta2))
            self.members.append((adamw, optim.lr))
        if muon:
            rate = _rate(optim.muon_lr, device)
            self.members.append((Muon(muon.values(), rate, optim.momentum, optim.weight_decay), optim.muon_lr))
        self.names = {id(p): n for n, p in named.items()}
        for name, first in getattr(model, HELD_ROWS, {}).items():
            if name in named:
                setattr(named[name], HELD_FROM, first)
        self.tables = [p for p in named.values() if _held_rows(p) is not None]
        """Parameters with held rows: weight decay would change these without a gradient."""

    def step(self, factor: float) -> None:
        self.set_rate(factor)
        self.step_unless(None)

    def rates(self, factor: float) -> dict[str, float]:
        """Return the learning rates of a step by the names of their fields: `lr` of AdamW, `muon_lr` of Muon."""
        names = {AdamW: "lr", Muon: "muon_lr"}
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
        kept = [(rows, rows.clone()) for p in self.tables if (rows := _held_rows(p)) is not None]
        for member, _ in self.members:
            member.step(found_inf, shrink)
        for rows, values in kept:
            rows.copy_(values)
        if kept:
            accelerate.renew_copies(self.tables)

    def zero_grad(self) -> None:
        """Delete all gradients."""
        for member, _ in self.members:
            for group in member.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

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
                    member.state[parameter] = {
                        key: value.to(parameter.device if key != "step" or group.get("fused") else "cpu", copy=True)
                        for key, value in held.items()
                    }
        left = sorted(f"{owner}/{key}" for owner, held in keys.items() for key in held)
        if left:
            raise ValueError(
                f"the optimizer state holds {left[0]} and {len(left) - 1} more that belong to no parameter."
            )


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
    gradients = [p.grad for p in parameters if p.grad is not None]
    if (kernel := accelerate.norm_kernel(gradients)) is not None:
        return kernel.norm(gradients)
    if any(gradient.dtype is torch.bfloat16 for gradient in gradients):  # their norms in float32
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
    return torch.nn.utils.get_total_norm(gradients)


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
