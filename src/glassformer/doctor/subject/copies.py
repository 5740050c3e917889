"""Copies of a model that probes share, with the answers that they gave.

A deep copy for each probe costs more than many of the calls that the probe makes, and several probes make the same
call. So a copy is kept for each factor on the matrices and each dtype. After each use it is restored: attributes,
hooks, modes, gradients, contents of dictionaries and lists. A copy in which a tensor was written to is not used again.
A probe that changes weights asks for a copy of its own, because what another probe recorded refers to shared weights.

An answer is used again only for the same input, where the copy and the circumstances are the same: no tensor written
to, no module in training mode, no hook added, no gradient asked for, no mode of torch active but those listed here.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from glassformer.doctor.subject.isolate import (
    NoDropout,
    TimeCheck,
    borrowed,
    n_bytes,
    prepare,
    preserved,
    quiet,
    too_large,
)
from glassformer.doctor.subject.snapshot import contents_of, referenced, refill

KEPT_BYTES = 1_100_000_000
"""All copies, the one in use included, take at most this much: of GPT-2 small one in float64 or two in float32."""
SMALL_BYTES = 1 << 26
"""Up to this a copy is compared number by number after each use."""
ANSWER_BYTES = 1 << 26
"""Answers of one copy that are kept take at most this much."""


def _state(tensor: Tensor) -> tuple[int, int, torch.dtype, bool]:
    """What differs after a tensor was written to, cast, or frozen."""
    return tensor._version, tensor.data_ptr(), tensor.dtype, tensor.requires_grad


class SharedCopy:
    """A copy of a model in eval mode, what it was when it was made, and the answers it has given since."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.modules = list(model.modules())
        held = list(referenced(model))
        self.contents = contents_of(held)
        self.tensors = [value for value in held if isinstance(value, Tensor)]
        self.states = [_state(t) for t in self.tensors]
        self.hooks = self._n_hooks()
        self.bytes = n_bytes(model)
        # writing through `.data` does not count as a new version; a large model is not compared number by number
        self.values = [t.detach().clone() for t in self.tensors] if self.bytes <= SMALL_BYTES else []
        self.answers: dict[Any, Any] = {}
        self.answer_bytes = 0

    def _n_hooks(self) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules)

    def unwritten(self) -> bool:
        """Whether every tensor is as it was made."""
        return [_state(t) for t in self.tensors] == self.states

    def restore(self) -> bool:
        """Put attributes and contents back; False where a tensor was written to, so that the copy is of no more use."""
        for container, was in self.contents:
            refill(container, was)
        if not self.unwritten() or not all(map(torch.equal, self.values, self.tensors)):
            return False
        for tensor in self.tensors:
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None
        return True

    def repeats(self) -> bool:
        """Whether a call now gives what the same call gave before."""
        return not any(m.training for m in self.modules) and self._n_hooks() == self.hooks and self.unwritten()

    def keep(self, key: Any, answer: Any, size: int) -> None:
        while self.answers and self.answer_bytes + size > ANSWER_BYTES:
            self.answer_bytes -= self.answers.pop(next(iter(self.answers)))[1]
        if size <= ANSWER_BYTES:
            self.answers[key] = (answer, size)
            self.answer_bytes += size


class Copies:
    """The copies of one model that are kept, by factor and dtype, the latest used last."""

    def __init__(self) -> None:
        self.of: nn.Module | None = None
        self.states: list[Any] = []
        self.kept: dict[tuple[float, torch.dtype | None], SharedCopy] = {}
        self.sharing = True
        """False for a model that keeps something of a call: each probe gets a new copy."""
        self.spoiled = 0
        """How many shared copies had to be given up because a tensor in them was written to."""

    @contextlib.contextmanager
    def borrow(
        self, model: Any, warm: float, dtype: torch.dtype | None, train: bool, in_place: bool, own: bool
    ) -> Iterator[tuple[Any, SharedCopy | None]]:
        """Yield a copy of the model as `isolate.borrowed` does, and what is shared of it."""
        shared = None
        sharing = self.sharing and not own and not in_place
        if sharing and isinstance(model, nn.Module) and not too_large(model):
            shared = self._take(model, warm, dtype)
        if shared is None:
            self._make_room(n_bytes(model))
            with borrowed(model, warm, dtype, train, in_place) as isolated:
                yield isolated, None
            return
        with preserved(model):
            shared.model.train(train)
            yield shared.model, shared
        if shared.restore():
            self._keep((warm, dtype), shared)
        else:
            self.spoiled += 1

    def _take(self, model: nn.Module, warm: float, dtype: torch.dtype | None) -> SharedCopy | None:
        """Return a kept copy, which is not lent again until it is given back, or a new one; None if it fails."""
        with contextlib.suppress(Exception), quiet():
            states = [_state(t) for t in [*model.parameters(), *model.buffers()]]
            if self.of is not model or states != self.states:
                self.of, self.states, self.kept = model, states, {}
            if (found := self.kept.pop((warm, dtype), None)) is not None:
                return found
            self._make_room(n_bytes(model) * (2 if dtype == torch.float64 else 1))
            made = copy.deepcopy(model)
            prepare(made, warm, dtype, train=False)
            return SharedCopy(made)
        return None

    def _keep(self, key: tuple[float, torch.dtype | None], shared: SharedCopy) -> None:
        self._make_room(shared.bytes)
        if shared.bytes <= KEPT_BYTES:
            self.kept[key] = shared

    def _make_room(self, wanted: int) -> None:
        while self.kept and sum(one.bytes for one in self.kept.values()) + wanted > KEPT_BYTES:
            del self.kept[next(iter(self.kept))]


def n_bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def answered(
    shared: SharedCopy | None, what: Any, given: dict[str, Any], compute: Callable[[], Any], size: Callable[[Any], int]
) -> Any:
    """What `compute` returns, or what it returned before for the same input where a call would repeat it."""
    key = None if shared is None else _key(what, given)
    if shared is None or key is None or not shared.repeats():
        return compute()
    if key not in shared.answers:
        answer = compute()
        if shared.repeats():
            shared.keep(key, answer, size(answer))
        return answer
    return shared.answers[key][0]


def _key(what: Any, given: dict[str, Any]) -> Any:
    """An input and the modes it is computed under; None where it cannot be compared, or gradients are asked for."""
    modes = [type(mode) for mode in _get_current_function_mode_stack() if not isinstance(mode, TimeCheck)]
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() or any(m is not NoDropout for m in modes):
        return None
    parts: list[Any] = [what, len(modes)]
    for name, value in sorted(given.items()):
        if isinstance(value, Tensor):
            parts.append((name, tuple(value.shape), value.dtype, value.cpu().numpy().tobytes()))
        elif value is None or isinstance(value, bool | int | str):
            parts.append((name, value))
        else:
            return None
    return tuple(parts)
