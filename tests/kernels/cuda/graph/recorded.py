"""CUDA graphs on a CPU: what is launched while a graph is captured is recorded, and replayed on the same memory."""

import contextlib
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer.model.cache import Cache

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "lift_fresh", "bernoulli", "native_dropout")
"""Operations whose result the host reads, that copy from its memory, or that draw: a graph cannot repeat them."""


class Graph(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self):
        super().__init__()
        self.operations, self.replays, self.given_pool = [], 0, None
        Graph.made.append(self)

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.given_pool = pool
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)

    def pool(self):
        """Return the memory that this graph shares: that of the graph which was captured first."""
        return self if self.given_pool is None else self.given_pool

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}\nmore")
        made = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, made))
        return made

    def replay(self):
        self.replays += 1
        for func, args, kwargs, made in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


def _tensors(value):
    parts = value if isinstance(value, tuple | list) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


class Stream:
    """In place of a CUDA stream: it notes which other streams it waits for."""

    now: "Stream"

    def __init__(self, name="side"):
        self.name, self.waits = name, []

    def wait_stream(self, other):
        self.waits.append(other.name)

    @contextlib.contextmanager
    def computes(self):
        before, Stream.now = Stream.now, self
        try:
            yield
        finally:
            Stream.now = before


def record(monkeypatch):
    """Let graphs be recorded in place of captured."""
    Graph.made, Stream.now = [], Stream("main")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Stream.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream.computes())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    # as on a GPU, where positions that were given are not known without waiting
    last = Cache.last_position
    monkeypatch.setattr(Cache, "last_position", lambda held, new: last(held, new) if held.positions is None else None)
