"""How a model takes a cache that it does not return: one that it fills in place, or one that it keeps itself."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.doctor.subject.arguments import (
    ADDRESSES,
    RESETS,
    SETUPS,
    Begin,
    Filler,
    InferenceParams,
    Reset,
    Setup,
    fillers,
)
from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.measure import gap
from glassformer.doctor.subject.snapshot import referenced
from glassformer.doctor.subject.subject import Subject


def settle_cache(subject: Subject) -> None:
    """Find by trying whether the model keeps a cache itself, or fills an empty one that it is given."""
    if subject.interface.cache is None:
        _settle_internal(subject)
    elif subject.interface.maker is None:
        _settle_given(subject)


def _settle_internal(subject: Subject) -> None:
    """Whether the model keeps a cache itself and takes an argument with the positions of new tokens."""
    face = subject.interface
    if any(name in ADDRESSES for name in face.fill):
        face.internal = _writes_cache(subject)
        return
    if subject.module is None or not hasattr(subject.module, "forward"):
        return
    optional = inspect.signature(subject.module.forward).parameters
    for begin, address in _ways_to_begin(subject, list(optional)):
        face.begin, face.address, face.internal = begin, address, True
        if _continues(subject):
            face.positions = None if face.positions in address else face.positions
            return
        face.begin, face.address, face.internal = None, {}, False
    for name in (name for name in ADDRESSES if name in optional and name != face.positions):
        for filler in fillers(name):
            face.fill[name] = filler
            if _writes_cache(subject):
                face.internal = True
                return
            del face.fill[name]


def _ways_to_begin(subject: Subject, optional: list[str]) -> Iterator[tuple[Begin, dict[str, Filler]]]:
    """Ways to start a sequence with a cache inside the model, while a plain call goes without one.

    Its own method makes caches for a batch size, and an argument says where new tokens are; or a flag makes it collect
    keys and values, and its own method forgets them.
    """
    face, model = subject.interface, subject.model
    made = next((n for n in SETUPS if callable(getattr(model, n, None))), None)
    if made is not None and face.setup is None:
        length = min(subject.facts.whole("max_len") or 256, 4096)
        for name in (n for n in ADDRESSES if n in optional):
            for filler in fillers(name):
                yield Setup(made, length), {name: filler}
        yield Setup(made, length), {}
    if face.use_cache is not None:
        for name in (n for n in dir(type(model)) if RESETS.match(n) and callable(getattr(model, n))):
            yield Reset(name), {}


def _continues(subject: Subject) -> bool:
    """Whether a second call reads what the first one left: other tokens before give other logits."""
    after = []
    with contextlib.suppress(Exception), quiet(), subject.isolated() as isolated:
        for seed in (0, 1):
            tokens = torch.cat([isolated.tokens(2, 3, seed=seed), isolated.tokens(2, 2, seed=5)], 1)
            _, cache = isolated.call(tokens[:, :3], cache=isolated.new_cache(2), with_cache=True)
            after.append(isolated.call(tokens[:, 3:], cache=cache, with_cache=True)[0])
        return gap(*after) > 0
    return False


def _writes_cache(subject: Subject) -> bool:
    """Whether a call changes a tensor named like a cache. A table of rotations may be named so, and is only read."""
    with contextlib.suppress(Exception), quiet(), subject.isolated() as isolated:
        before = {name: value.clone() for name, value in _named_caches(isolated.model).items()}
        isolated.logits(isolated.tokens(2, isolated.length(5)))
        after = _named_caches(isolated.model)
        return any(
            name not in before or value.shape != before[name].shape or bool((value != before[name]).any())
            for name, value in after.items()
        )
    return False


def _named_caches(model: Any) -> dict[str, Tensor]:
    """Tensors of a module that are named like a cache, other than parameters."""
    found = dict[str, Tensor]()
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        held = {**dict(module.named_buffers(recurse=False)), **vars(module)}
        found |= {f"{path}.{n}": v for n, v in held.items() if "cache" in n.lower() and isinstance(v, Tensor)}
    return found


def _settle_given(subject: Subject) -> None:
    """Which empty container the model fills, if a call returns no cache by itself."""
    with contextlib.suppress(Exception), quiet(), subject.isolated() as isolated:
        if isolated.call(isolated.tokens(2, isolated.length(3)), with_cache=True)[1] is not None:
            return
    layers = subject.facts.whole("n_layers") or len(subject.blocks()) or 1
    empty: list[Callable[[], Any]] = [dict, list, lambda: [None] * layers]
    empty += [lambda: [{} for _ in range(layers)], lambda: [[] for _ in range(layers)]]
    if subject.interface.cache == "inference_params":
        empty.insert(0, InferenceParams)
    subject.interface.empty = next((make for make in empty if _fills(subject, make)), None)


def _fills(subject: Subject, make: Callable[[], Any]) -> bool:
    """Whether a call puts tensors into this container and the next call reads them."""
    with contextlib.suppress(Exception), quiet(), subject.isolated() as isolated:
        tokens, cache = isolated.tokens(2, isolated.length(5)), make()
        isolated.call(tokens[:, :3], cache=cache, with_cache=True)
        if not any(isinstance(value, Tensor) for value in referenced(cache)):
            return False
        # one token: some models take no more than that with a cache
        after, _ = isolated.call(tokens[:, 3:4], cache=cache, with_cache=True)
        return gap(after, isolated.logits(tokens[:, 3:4])) > 0
    return False
