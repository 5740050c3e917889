"""A model as it is now, so that it can be restored; and whether a deep copy of it computes with its own weights.

`copy.deepcopy` copies modules and bound methods, but not functions: a lambda that a block keeps over its own submodules
still calls the original's submodules from the copy. Such a copy has the original's mode, weights and gradients in some
parts and its own in others. It is recognised here, and the model is then examined in place and restored.
"""

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)


def referenced(root: Any) -> Iterator[Any]:
    """Every object that a model refers to: attributes, containers, closures and defaults of functions, methods."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        waiting += _inside(value)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, types.FunctionType):
        return [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return list(_attributes(value).values())


def _cells(function: types.FunctionType) -> list[Any]:
    """What a closure holds; a variable that is not assigned yet holds nothing."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _attributes(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def contents_of(held: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Containers and dictionaries of attributes among these objects, each with a shallow copy of what it holds."""
    found: list[tuple[Any, Any]] = []
    for value in held:
        if isinstance(value, dict | list | set):
            found.append((value, copy.copy(value)))
        elif not isinstance(value, Tensor | types.FunctionType | types.MethodType | tuple | frozenset):
            found.append((_attributes(value), dict(_attributes(value))))
    return found


class Snapshot:
    """Parameters, buffers, gradients, modes, hooks, attributes and random state; `restore` puts them back bit for bit.

    Contents of dictionaries, lists and sets that the model refers to are included, so that a cache which a call leaves
    on the model is gone afterwards. Each tensor keeps its identity, its storage and its dtype.
    """

    def __init__(self, model: Any):
        self.random = RandomState()
        self.tensors: list[tuple[Tensor, Tensor, Tensor, Tensor | None, bool]] = []
        held = list(referenced(model))
        self.contents = contents_of(held)
        for value in held:
            if isinstance(value, Tensor):
                gradient = value.grad if value.is_leaf else None
                self.tensors.append((value, value.data, value.data.clone(), gradient, value.requires_grad))
        self.gradients = [(g, g.data, g.data.clone()) for _, _, _, g, _ in self.tensors if g is not None]

    @torch.no_grad()
    def restore(self) -> None:
        self.random.restore()
        for container, was in self.contents:
            refill(container, was)
        for gradient, data, values in self.gradients:  # casting a module casts its gradients too
            data.copy_(values)
            gradient.data = data
        for tensor, data, values, wanted, trained in self.tensors:
            data.copy_(values)
            tensor.data = data
            if tensor.is_leaf:
                tensor.requires_grad_(trained)
                tensor.grad = wanted


def refill(container: Any, was: Any) -> None:
    """Give a container its former contents, without touching one that has them still."""
    if isinstance(container, dict):
        if [*map(id, container), *map(id, container.values())] != [*map(id, was), *map(id, was.values())]:
            container.clear()
            container.update(was)
    elif isinstance(container, list):
        if [*map(id, container)] != [*map(id, was)]:
            container[:] = was
    elif {*map(id, container)} != {*map(id, was)}:
        container.clear()
        container.update(was)


def seed_torch(seed: int = 0) -> None:
    """Seed torch's generators as `torch.manual_seed` does, those of a GPU only if it is in use.

    Where there is no GPU, `torch.manual_seed` formats three stack traces and keeps them: 2 ms and some memory a call.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class RandomState:
    """The state of torch's generators, on the CPU and on every GPU in use."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def copies_faithfully(model: nn.Module, call: Callable[[nn.Module], Any]) -> bool:
    """Whether a deep copy can be made and computes what the model computes, with the copy's own weights alone.

    `call` runs a model on some tokens; what it raises is no answer. The model is left as it was.
    """
    snapshot = Snapshot(model)
    try:
        twin = copy.deepcopy(model)
        mine = {id(m) for m in model.modules()} | {id(p) for p in model.parameters()}
        if any(id(value) in mine for value in referenced(twin)):
            return False
        return _same_answers(model, twin, call)
    except Exception:
        return False
    finally:
        snapshot.restore()


def _same_answers(model: nn.Module, twin: nn.Module, call: Callable[[nn.Module], Any]) -> bool:
    """In eval mode: the same output, no call of the original's modules and no gradient to its parameters."""
    called: list[nn.Module] = []
    handles = [m.register_forward_pre_hook(lambda m, _: called.append(m)) for m in model.modules()]
    try:
        answer = _answer(twin, call)
        if called:
            return False
    finally:
        for handle in handles:
            handle.remove()
    if answer is None:
        return True
    loose = [t for t in answer if t.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if loose and wanted:
        total = torch.stack([t.float().sum() for t in loose]).sum()
        if any(g is not None for g in torch.autograd.grad(total, wanted, allow_unused=True)):
            return False
    first, second = _answer(model, call), _answer(model, call)
    if first is None or second is None or not _equal(first, second):
        return True  # it does not repeat itself, so there is nothing to compare with
    return _equal(first, answer)


def _answer(model: nn.Module, call: Callable[[nn.Module], Any]) -> list[Tensor] | None:
    """The floating tensors of a call in eval mode with one seed; None where it fails."""
    model.eval()
    seed_torch()
    try:
        with torch.enable_grad():
            output = call(model)
    except (Exception, SystemExit):
        return None
    return [v for v in referenced(output) if isinstance(v, Tensor) and v.is_floating_point()]


def _equal(one: list[Tensor], two: list[Tensor]) -> bool:
    """To 1e-3 of the largest number: a copy that differs by rounding is a copy."""
    if len(one) != len(two) or any(a.shape != b.shape for a, b in zip(one, two, strict=True)):
        return False
    return all(
        torch.allclose(a.detach(), b.detach(), rtol=0.0, atol=1e-3 * _size(a), equal_nan=True)
        for a, b in zip(one, two, strict=True)
    )


def _size(tensor: Tensor) -> float:
    finite = tensor.detach()[torch.isfinite(tensor.detach())]
    return float(finite.abs().max()) if finite.numel() else 0.0
