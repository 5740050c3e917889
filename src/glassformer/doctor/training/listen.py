"""Listen to one update: the forward passes, what each logit is trained towards, and the gradients that arrive.

The gradient of a cross-entropy with respect to the logits at one position is w · (p - onehot(target)). So the most
negative entry is the target, and -gradient[target] / (1 - p[target]) is w, its weight in the loss. Nothing has to be
known about the batch, the labels or the code of the loss.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from glassformer.doctor.subject import interface as calls
from glassformer.doctor.subject.errors import Unsupported
from glassformer.shapes import Bool, Float, Int

CALLS = 64
"""Steps after which an update is no longer waited for."""
CERTAIN = 1e-3
"""Where 1 - p of the target is less, its gradient is too small to tell its weight."""


@dataclass
class Forward:
    """One forward pass in training: what the model read, and its logits."""

    tokens: Int[Tensor, "B T"]
    training: bool
    mask: Tensor | None = None
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    logits: Float[Tensor, "B T V"] | None = None
    gradient: Float[Tensor, "B T V"] | None = None
    """Of what was minimised, with respect to the logits."""

    @property
    def trained(self) -> Bool[Tensor, "B T"]:
        """Positions whose logits get a gradient."""
        return self._gradient().abs().amax(-1) > 0

    @property
    def targets(self) -> Int[Tensor, "B T"]:
        """The id that each position is trained towards; of no meaning where it is not trained."""
        return self._gradient().argmin(-1)

    @property
    def weights(self) -> Float[Tensor, "B T"]:
        """The weight of each position in the loss; NaN where it is not known."""
        assert self.logits is not None
        target = self.targets[..., None]
        p = self.logits.double().softmax(-1).gather(-1, target)[..., 0]
        found = -self._gradient().double().gather(-1, target)[..., 0] / (1 - p)
        return torch.where(self.trained & (1 - p > CERTAIN), found, torch.full_like(found, torch.nan))

    def loss(self) -> float:
        """Return the mean cross-entropy of the targets."""
        assert self.logits is not None
        rows, targets = self.logits[self.trained].double(), self.targets[self.trained]
        return float(F.cross_entropy(rows, targets)) if len(rows) else float("nan")

    def _gradient(self) -> Tensor:
        if self.gradient is None:
            raise Unsupported("no gradient of logits (B,T,V) was seen: the loss does not come from the model's output")
        return self.gradient


@dataclass
class Update:
    """What happened between two calls of the optimizer."""

    forwards: list[Forward] = field(default_factory=list)
    calls: int = 0
    """Steps until the optimizer ran."""
    returned: Any = None
    stepped: bool = False
    rates: list[float] = field(default_factory=list)
    arrived: dict[str, Tensor] = field(default_factory=dict)
    """Sum of the gradients that backward passes gave each parameter."""
    used: dict[str, Tensor] = field(default_factory=dict)
    """The gradients when the optimizer ran."""
    stale: list[str] = field(default_factory=list)
    """Parameters that had a gradient already when the first one arrived."""

    @property
    def factor(self) -> float:
        """What happened to the gradients between backward and the optimizer: unscaling and clipping."""
        pairs = [(self.arrived[n].double(), g.double()) for n, g in self.used.items() if n in self.arrived]
        size = sum(float(a.square().sum()) for a, _ in pairs)
        return sum(float((a * g).sum()) for a, g in pairs) / size if size else 1.0

    def examined(self) -> list[Forward]:
        """Return the forward passes whose logits got a gradient. Raises Unsupported if there are none."""
        found = [f for f in self.forwards if f.gradient is not None and bool(f.trained.any())]
        if not found:
            why = "the model was not called" if not self.forwards else "its logits got no gradient"
            raise Unsupported(f"what the loss trains towards was not seen: {why}")
        return found

    def loss(self) -> float:
        """Return the cross-entropy per target, over all forward passes."""
        parts = [(f.loss(), int(f.trained.sum())) for f in self.examined()]
        return sum(loss * n for loss, n in parts) / sum(n for _, n in parts)


class _Ids(TorchFunctionMode):
    """Hears token ids at the embedding and logits at the loss, where the model's own `forward` is not called."""

    def __init__(self, update: Update, model: nn.Module):
        super().__init__()
        self.update, self.model, self.inside = update, model, 0
        self.tokens: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.inside and torch.is_grad_enabled():
            if func is F.embedding and args[0].dim() == 2:
                self.tokens = args[0] if self.tokens is None else self.tokens
            elif func is F.cross_entropy and self.tokens is not None:
                self._logits(args[0] if args else kwargs["input"])
        return func(*args, **kwargs)

    def _logits(self, logits: Tensor) -> None:
        tokens, self.tokens = self.tokens, None
        if tokens is None or logits.dim() != 2 or len(logits) != tokens.numel() or not logits.requires_grad:
            return
        shape = (*tokens.shape, logits.shape[-1])
        forward = Forward(tokens.detach(), self.model.training, logits=logits.detach().view(shape))
        logits.register_hook(lambda g: _add(forward, g.detach().view(shape)))
        self.update.forwards.append(forward)


def _add(forward: Forward, gradient: Tensor) -> None:
    forward.gradient = gradient if forward.gradient is None else forward.gradient + gradient


@contextlib.contextmanager
def _heard(update: Update, model: nn.Module) -> Iterator[None]:
    """Record the calls of the model and the gradients of its parameters."""
    ids = _Ids(update, model)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        ids.inside += 1

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ids.inside -= 1
        if torch.is_grad_enabled() and ids.inside == 0:
            forward = _forward(module, args, kwargs, output)
            if forward is not None:
                update.forwards.append(forward)

    def arrives(name: str, p: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if name not in update.arrived:
                if p.grad is not None and bool(p.grad.any()):
                    update.stale.append(name)
                update.arrived[name] = gradient.detach().clone()
            else:
                update.arrived[name] += gradient.detach()

        return hook

    handles = [
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(leave, with_kwargs=True),
    ]
    handles += [p.register_hook(arrives(n, p)) for n, p in model.named_parameters() if p.requires_grad]
    try:
        with ids:
            yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Forward | None:
    """Return what a call read and gave back, if that is token ids and logits."""
    named = {n: v for n, v in kwargs.items() if n not in calls.LABELS}
    whole = [v for v in (*args, *named.values()) if _is_ids(v)]
    if not whole:
        return None
    tokens = next((named[n] for n in calls.TARGET if _is_ids(named.get(n))), whole[0])
    mask = next((named[n] for n in calls.MASK if isinstance(named.get(n), Tensor)), None)
    forward = Forward(tokens.detach(), module.training, mask, (args, kwargs))
    shape = (tokens.shape[0], tokens.shape[1])
    for candidate in calls._candidates(output):
        flat = isinstance(candidate, Tensor) and candidate.dim() == 2 and len(candidate) == tokens.numel()
        if (calls.is_logits(candidate, shape) or flat) and candidate.requires_grad:
            forward.logits = candidate.detach().view(*shape, -1)
            candidate.register_hook(lambda g: _add(forward, g.detach().view(*shape, -1)))
            return forward
    return forward


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() and value.dtype != torch.bool
    )


def listen(pipeline: Any, batch: Any) -> Update:
    """Run steps until the optimizer has run once (or 64 were done), and return what was heard."""
    update, optimizer = Update(), pipeline.optimizer
    parameters = dict(pipeline.model.named_parameters())

    def before() -> None:
        if update.stepped:
            return
        update.stepped = True
        update.used = {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}
        update.rates = [float(group["lr"]) for group in optimizer.param_groups]

    with _before_step(optimizer, before), _heard(update, pipeline.model):
        while update.calls < CALLS and not update.stepped:
            update.returned = pipeline.run(batch)
            update.calls += 1
            if optimizer is None:
                break
    return update


@contextlib.contextmanager
def _before_step(optimizer: Any, call: Callable[[], None]) -> Iterator[None]:
    """Call a function before each step of an optimizer. Those of `training.optimizers` have no hooks."""
    if optimizer is None:
        yield
    elif hasattr(optimizer, "register_step_pre_hook"):
        handle = optimizer.register_step_pre_hook(lambda own, args, kwargs: call())
        try:
            yield
        finally:
            handle.remove()
    else:
        own, step = vars(optimizer).get("step"), optimizer.step

        def heard(*args: Any, **kwargs: Any) -> Any:
            call()
            return step(*args, **kwargs)

        optimizer.step = heard
        try:
            yield
        finally:
            del optimizer.step
            if own is not None:
                optimizer.step = own
