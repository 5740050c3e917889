"""Decode steps after a prompt, replayed as a CUDA graph: any model, any number of sequences.

One sequence of a large model with weights in 8 bits needs no graph: one launch runs many steps (`program.py`).
`captured_steps` takes over the KV cache of a prompt that the engine has read. Shapes never change from step to step, so
one capture serves the whole generation, and the next one of the same model and size.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glassformer.kernels.cuda.graph import parts
from glassformer.kernels.cuda.graph.cache import CapturedCache
from glassformer.kernels.cuda.graph.fused import FusedStep
from glassformer.kernels.cuda.graph.launches import SHARED_MEMORY, WEIGHTS, Launch
from glassformer.kernels.cuda.graph.linear import LARGEST_BATCH
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM, Seq2Seq
from glassformer.model.cache import Cache
from glassformer.model.context import NO_TAP
from glassformer.model.moe import MoE
from glassformer.model.transformer import modules_of
from glassformer.shapes import Bool, Float, Int

LONG_GRAPH = 8
"""Steps of a graph for greedy runs: between two graphs the GPU waits some microseconds."""
SLOT_STEP = 256
"""Capacities are rounded up to a multiple of this, so that a generation of similar length reuses the last capture."""


def why_not_fused(model: DecoderLM | Seq2Seq, batch: int, precision: str) -> str | None:
    """Return why a step of a model consists of torch's kernels alone, or None if fused kernels compute parts of it."""
    if precision not in WEIGHTS:
        return f"the fused kernels have no {precision}"
    if WEIGHTS[precision] and batch > LARGEST_BATCH:
        return f"the fused kernels multiply weights in 8 bits with up to {LARGEST_BATCH} vectors, not {batch}"
    if (reason := parts.unsupported_parts(model.config, 0).get("model")) is not None:
        return reason
    return unsupported_device(model.device)


def unsupported_device(device: torch.device) -> str | None:
    if device.type == "cuda" and (reason := _unsupported_gpu(device)) is not None:
        return reason
    return None if nvrtc.is_available() else "CUDA's run-time compiler (libnvrtc) was not found"


@cache  # each generation asks, before its prompt is launched
def _unsupported_gpu(device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the GPU is older than compute capability 9.0"
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_MEMORY)
    if room < SHARED_MEMORY:
        return f"a block has {room} bytes of shared memory on this GPU, and the kernels need {SHARED_MEMORY}"
    return None


class EngineStep:
    """One new token per sequence, computed by the modules of the engine."""

    def __init__(self, model: DecoderLM | Seq2Seq, cache: CapturedCache, memory_mask: Bool[Tensor, "B N"] | None):
        self.cache, self.memory_mask = cache, memory_mask
        self.program = None
        # the parts, not the model: captured steps must not keep a model alive
        self.embed, self.decoder, self.head = model.embed, model.decoder, model.head
        batch, device = cache.batch, model.device
        self.tokens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.history = torch.zeros(batch, cache.slots + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=torch.float32, device=device)
        self.operations: list[Launch | Callable[[], object]] = [self._compute]

    def _compute(self) -> None:
        head: Any = self.head
        hidden = self.decoder(self.embed(self.tokens[:, None].long()), cache=self.cache, memory_mask=self.memory_mask)
        self.logits.copy_(head(hidden, self.embed.tokens.weight)[:, 0])
        self.tokens.copy_(self.logits.argmax(-1))
        self.history.index_copy_(1, (self.cache.slot + 1)[None], self.tokens[:, None])
        self.cache.slot += 1


class CapturedSteps:
    """The steps of some sequences. On a CPU they are computed one by one, for tests."""

    def __init__(self, step: FusedStep | EngineStep, fused: str):
        self.body, self.cache, self.fused = step, step.cache, fused
        """`fused` says which parts the fused kernels compute."""
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Captured graphs by their number of steps."""
        self.user: weakref.ref[Any] | None = None
        """The generation that continues this cache. Another one may do so when it no longer exists."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return the logits after one more token per sequence."""
        self.body.tokens.copy_(tokens)
        self._replay(1)
        return self.body.logits.clone()

    def greedy(self, tokens: Int[Tensor, "B"], count: int) -> tuple[Int[Tensor, "N B"], Float[Tensor, "B V"]]:
        """Return the `count` tokens after the given ones, each the most likely, and the last logits."""
        self.body.tokens.copy_(tokens)
        first = self.cache.length + 1
        self._replay(count)
        return self.body.history[:, first : first + count].T, self.body.logits

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        self.cache.reorder(parents)

    @torch.no_grad()
    def _replay(self, count: int) -> None:
        if self.cache.length + count > self.cache.slots:
            raise ValueError(
                f"{count} tokens more than {self.cache.length} do not fit a cache of {self.cache.slots}: ask for fewer."
            )
        left = count
        if self.body.program is not None:
            self.body.program.run(count)
            left = 0
        while left:
            size = LONG_GRAPH if left >= LONG_GRAPH else 1
            if self.cache.device.type == "cuda":
                self._graph(size).replay()
            else:
                self.run(size)
            left -= size
        self.cache.length += count

    def run(self, size: int = 1) -> None:
        """Launch every operation of some steps."""
        for _ in range(size):
            for operation in self.body.operations:
                operation.run() if isinstance(operation, Launch) else operation()

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        """Return the graph of `size` steps, captured at its first use."""
        if size in self.graphs:
            return self.graphs[size]
        with _CHOOSING, torch.cuda.device(self.cache.device), experts_without_waiting(self.body.decoder):
            self.compile()
            tokens, slot = self.body.tokens.clone(), self.cache.slot.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # before the capture: torch chooses algorithms and allocates workspaces
                self.run()
            torch.cuda.current_stream().wait_stream(side)
            self.body.tokens.copy_(tokens)
            self.cache.slot.copy_(slot)
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size], capture_error_mode="thread_local"):  # others may compute
                self.run(size)
        return self.graphs[size]

    def compile(self) -> None:
        """Compile all kernels at once: each takes some tenths of a second, the first time on a machine."""
        texts = {op.text() for op in self.body.operations if isinstance(op, Launch)}
        capability = torch.cuda.get_device_capability()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda text: nvrtc.compiled(text, capability), texts))


_CHOOSING = threading.RLock()
"""Held while steps are chosen and captured: one thread at a time."""
_LAST: "weakref.WeakKeyDictionary[Any, tuple[Any, CapturedSteps]]" = weakref.WeakKeyDictionary()
"""The steps that were captured last for each model, and what they were captured for."""


@torch.no_grad()
def captured_steps(
    model: DecoderLM | Seq2Seq,
    filled: Cache,
    batch: int,
    slots: int,
    precision: str,
    memory_mask: Bool[Tensor, "B N"] | None = None,
    user: object | None = None,
) -> CapturedSteps:
    """Return the steps that continue a cache. Those captured last are used again if model and sizes are the same.

    `user` is the object that they belong to: as long as it exists, no other generation gets them.
    """
    key = (batch, precision, fingerprint(model))
    with _CHOOSING:
        made_for, made = _LAST.get(model, (None, None))
        fits = made is not None and made_for == key and made.cache.slots >= slots and isinstance(model, DecoderLM)
        if made is not None and fits and (made.user is None or made.user() is None):
            made.cache.take(filled)
        else:
            cache = CapturedCache(filled, slots, batch)
            made = build_steps(model, cache, precision, memory_mask, _processors(model.device))
            _LAST[model] = (key, made)
        made.user = None if user is None else weakref.ref(user)
        return made


def build_steps(
    model: DecoderLM | Seq2Seq,
    cache: CapturedCache,
    precision: str,
    memory_mask: Bool[Tensor, "B N"] | None,
    processors: int,
) -> CapturedSteps:
    """Choose between the fused kernels and the modules of the engine."""
    if why_not_fused(model, cache.batch, precision) is not None:
        return CapturedSteps(EngineStep(model, cache, memory_mask), "no part")
    assert isinstance(model, DecoderLM)
    step = FusedStep(model, cache, cache.batch, precision, processors)
    fused = " and ".join(f"{part} of {n} layers" for part, n in step.is_fused.items() if n)
    return CapturedSteps(step, fused or "embedding and head")


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def fingerprint(model: torch.nn.Module) -> tuple[Any, ...]:
    """What changes if the weights move or change: kernels read the parameters in place, norms and biases as copies.

    Each generation asks, so modules are walked without `parameters()`, which takes three times as long.
    """
    parameters = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    return tuple([(p.data_ptr(), p._version) for p in parameters])


def addresses(modules: Iterable[torch.nn.Module]) -> list[int]:
    """What changes if the weights of some modules move, for kernels that copy none of them."""
    return [p.data_ptr() for module in modules for p in module._parameters.values() if p is not None]


@contextmanager
def experts_without_waiting(model: torch.nn.Module) -> Iterator[None]:
    """Let mixtures of experts compute every expert for every token: a graph cannot wait for what the router chose."""
    found = [module for module in model.modules() if isinstance(module, MoE)]
    for module in found:
        module.mix = _every_expert.__get__(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in found:
            del module.mix


def _every_expert(
    self: MoE, x: Float[Tensor, "*n D"], gates: Float[Tensor, "*n A"], choice: Int[Tensor, "*n A"]
) -> Float[Tensor, "*n D"]:
    every = gates.new_zeros(*gates.shape[:-1], len(self.experts)).scatter(-1, choice, gates)
    return torch.stack([expert(x, NO_TAP) * every[..., e, None] for e, expert in enumerate(self.experts)]).sum(0)
