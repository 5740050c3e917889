"""The decode state: prompts in, logits after the last token of each sequence out, one step at a time.

`TorchState` computes with the model itself, `KernelState` with a compiled kernel, and `CapturedState` with both: the
model reads the prompts. The loops of generation know only `DecodeState`, which is what they have in common.

Sequences of unequal length are padded on the left, so that the next token of every sequence has the same index; the
mask and the position ids keep padding invisible. An encoder-decoder reads the prompt with its encoder (padded on the
right) and starts its decoder from `special.start`.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from glassformer.generation.sampling import refuse_marked
from glassformer.model import DecoderLM, Model, Seq2Seq
from glassformer.model.cache import CacheKind
from glassformer.model.transformer import modules_of
from glassformer.shapes import Bool, Float, Int

Choose = Callable[[Tensor, int], Tensor]
"""Return the tokens that follow logits, for (logits, number of the step in its run). The host does not wait."""
Begin = Callable[[Tensor | None, int, Choose | None], Callable[[], list[list[int]]]]


class DecodeState(Protocol):
    """The running state of one generation."""

    model: Model
    """The model that computes the logits; a copy in another dtype where that was requested."""
    prompts: list[list[int]]
    """The tokens that the decoder starts from: the prompts, or the start token of an encoder-decoder."""
    owns_threads: bool
    """True: the steps run in CPU threads of their own, so torch should use one thread between them."""

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model, as they were when this was asked first: a walk through them takes a while."""

    @property
    def begin(self) -> Begin | None:
        """begin(tokens, count, choose) begins `count` steps after the given tokens, without waiting for them. Optional.

        None in place of the tokens: after those of the steps that were begun last. None in place of `choose`: each step
        takes the most likely tokens. It returns a function that waits for the steps, and returns one list of tokens per
        step.
        """

    def start(self) -> Float[Tensor, "B V"]:
        """Read the prompts and return the logits after them."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Read one more token per sequence and return the logits after it."""

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        """Let sequence i continue the present sequence parents[i]. The number of sequences may change."""


class TorchState:
    """The decode state of the model itself."""

    owns_threads = False
    reader: Any = None
    """What reads tokens in place of the model's embedding and decoder, where a kernel does."""

    def __init__(
        self,
        model: DecoderLM | Seq2Seq,
        prompts: list[list[int]],
        max_new_tokens: int,
        cache: CacheKind | None,
        chunk: int | None,
        capacity_step: int = 1,
    ):
        """`capacity_step`: the capacity of a static cache is rounded up to a multiple of it."""
        self.model: Any = model
        self.chunk = chunk
        self.memory: Tensor | None = None
        """Output of the encoder, after `start`."""
        self.source: Tensor | None = None
        self.source_mask: Tensor | None = None
        if isinstance(model, Seq2Seq):
            self.source, self.source_mask = pad(prompts, "right", model.device)
            prompts = starts(model, len(prompts))
        self.prompts = prompts
        self.tokens, real = pad(prompts, "left", torch.device("cpu"))
        """On the host: `start` copies the prompts to where they are read."""
        self.real = None if real is None else real.to(model.device, non_blocking=True)
        self.capacity = -(-(self.tokens.shape[1] + max_new_tokens) // capacity_step) * capacity_step
        self.cache = None if cache is None else model.new_cache(cache, capacity=self.capacity)

    @cached_property
    def modules(self) -> list[nn.Module]:
        return modules_of(self.model)

    @property
    def begin(self) -> Begin | None:
        return None

    def start(self) -> Float[Tensor, "B V"]:
        """Read the prompts, in chunks if that was requested, so that a long prompt needs less memory at a time."""
        if self.source is not None:
            self.memory = self.model.encode(self.source, self.source_mask)
        width = self.tokens.shape[1]
        size = self.chunk if self.chunk and self.cache is not None else width
        hidden: Any = None
        for first in range(0, width, size):
            tokens = self.tokens if size == width else self.tokens[:, first : first + size]
            real = None if self.real is None else self.real[:, first : first + size]
            if self.reader is not None:
                hidden = self.reader(tokens, real, self.cache)
                continue
            x = self.model.embed(tokens.to(self.model.device, non_blocking=True))
            hidden = self.model.decoder(x, real, cache=self.cache, memory=self.memory, memory_mask=self.source_mask)
        return self.model.logits(hidden[:, -1:])[:, 0]

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Read one more token per sequence: one position of work with a cache, everything again without one."""
        new, real = tokens[:, None], None
        if self.cache is None:
            self.tokens = torch.cat([self.tokens.to(new.device, non_blocking=True), new], dim=1)
            if self.real is not None:
                self.real = torch.cat([self.real, torch.ones_like(new, dtype=torch.bool)], dim=1)
            new, real = self.tokens, self.real
        hidden = self.model.decoder(
            self.model.embed(new), real, cache=self.cache, memory=self.memory, memory_mask=self.source_mask
        )
        return self.model.logits(hidden[:, -1:])[:, 0]  # the head is not applied to the other positions

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        self.tokens = self.tokens.to(parents.device, non_blocking=True)
        for name in ("tokens", "real", "memory", "source_mask"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held.index_select(0, parents))
        if self.cache is not None:
            self.cache.reorder(parents)


class CapturedState(TorchState):
    """The model reads the prompts, or `kernel.reads` does; `kernel.continues` makes the steps of the filled cache."""

    def __init__(
        self,
        model: DecoderLM | Seq2Seq,
        prompts: list[list[int]],
        max_new_tokens: int,
        chunk: int | None,
        kernel: Any,
        precision: str,
        captures: bool = True,
    ):
        """`captures`: False if so few steps follow that capturing them takes longer."""
        super().__init__(model, prompts, max_new_tokens, None, chunk, kernel.capacity_step)
        self.reader = None if kernel.reads is None else kernel.reads(model, self.modules)
        # keys and values that the reader wrote are read again only by a later chunk or by a step
        if self.reader is None or max_new_tokens > 1 or chunk is not None:
            self.cache = model.new_cache("static", capacity=self.capacity)
        self.continues, self.precision, self.captures = kernel.continues, precision, captures
        self.steps: Any = None
        self.last = torch.empty(0, dtype=torch.long)
        """The tokens of the last step that was begun, on the device."""

    @property
    def begin(self) -> Begin | None:  # kept as an attribute, it would keep this object alive, and so the steps
        return self._begin if self.captures else None

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        if not self.captures:
            return super().step(tokens)
        logits: Tensor = self._captured(tokens).step(tokens)
        return logits

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        if self.steps is None:
            super().reorder(parents)
        else:
            self.steps.reorder(parents)

    def _captured(self, tokens: Int[Tensor, "B"]) -> Any:
        """Return the steps, captured when the first token after the prompts is known."""
        if self.steps is None:
            cache: Any = self.cache
            self.steps = self.continues(
                self.model, cache, len(tokens), cache.capacity, self.precision, self.source_mask, user=self
            )
            self.cache = None
        return self.steps

    def _begin(
        self, tokens: Int[Tensor, "B"] | None, count: int, choose: Choose | None
    ) -> Callable[[], list[list[int]]]:
        """Begin some steps. The function that is returned waits for these, not for steps that follow."""
        tokens = self.last if tokens is None else tokens
        if choose is None:
            found, logits = self._captured(tokens).greedy(tokens, count)
            self.last = found[-1]
        else:
            found, logits = self._chosen(tokens, count, choose)
        # a NaN stays in the cached keys, so the last step shows any
        marks = logits.amax(-1).isnan().to(found.dtype).neg()
        every, wait = to_host(torch.cat([found, marks[None]]))

        def collect() -> list[list[int]]:
            wait()
            *steps, marks = every.tolist()
            for tokens in (*steps, marks):
                refuse_marked(tokens)
            return steps

        return collect

    def _chosen(
        self, tokens: Int[Tensor, "B"], count: int, choose: Choose
    ) -> tuple[Int[Tensor, "N B"], Float[Tensor, "B V"]]:
        """Launch `count` steps, each to the tokens that are chosen, and return these and the last logits.

        -1 stands for a token that was drawn from logits with NaN. The step that follows it reads another one.
        """
        steps, chosen = self._captured(tokens), []
        for i in range(count):
            logits = steps.step(tokens)
            chosen.append(choose(logits, i))
            tokens = chosen[-1].clamp(max=logits.shape[-1] - 1)
        self.last, found = tokens, torch.stack(chosen)
        return torch.where(found < logits.shape[-1], found, -1), logits


class KernelState:
    """The decode state of a compiled kernel that reads the prompts itself: an adapter around its decoder."""

    begin: Begin | None = None

    def __init__(self, model: DecoderLM | Seq2Seq, decoder: Any, prompts: list[list[int]], chunk: int | None):
        self.model: Model = model
        self.modules = modules_of(model)
        self.decoder, self.read, self.chunk = decoder, prompts, chunk
        self.prompts = starts(model, len(prompts)) if isinstance(model, Seq2Seq) else prompts
        self.owns_threads: bool = decoder.owns_threads

    def start(self) -> Float[Tensor, "B V"]:
        logits: Tensor = self.decoder.read(self.read, self.chunk)
        self.modules = []  # the steps call none of them
        return logits

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits: Tensor = self.decoder.step(tokens)
        return logits

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        self.decoder.reorder(parents)


def starts(model: Seq2Seq, sequences: int) -> list[list[int]]:
    """Return what the decoder of an encoder-decoder starts from, for each sequence."""
    start = model.config.special.start
    if start is None:
        raise ValueError("config.special.start is not set: an encoder-decoder needs a first decoder token.")
    return [[start] for _ in range(sequences)]


def ends_with(tokens: list[int], stops: Sequence[list[int]]) -> bool:
    """Return whether generated tokens end in one of the stop sequences."""
    return any(tokens[-len(stop) :] == stop for stop in stops)


@contextmanager
def evaluating(*models: Model, parts: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Switch dropout and gradients off, and restore the mode of every module afterwards.

    `parts` are all modules, where the caller knows them. Modules are read and written one by one: `train()` writes all
    of them, which takes longer than a step of a small model.
    """
    found = modules_of(*models) if parts is None else parts
    training = [module for module in found if module.training]
    for module in training:
        module.training = False
    try:
        with without_gradients():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def without_gradients() -> Iterator[None]:
    """Compute without gradients, outside of inference_mode: tensors made there could not be written after it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Let torch compute in this thread alone if `wanted`: while kernels with threads of their own decode.

    After a parallel operation of torch, its threads spin for milliseconds on the cores where the threads of the kernels
    would compute the next token. Sampling from 50,257 probabilities in two threads halves the speed of an int8 GPT-2.
    """
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pad(
    sequences: list[list[int]], side: str, device: torch.device
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Return sequences as one tensor and the mask of real tokens, None if all have the same length.

    The host does not wait for the device: memory that is not pinned has been read when `to` returns.
    """
    width = max(map(len, sequences))
    if min(map(len, sequences)) == width:
        return torch.stack([_ids(sequence) for sequence in sequences]).to(device, non_blocking=True), None
    tokens = torch.zeros(len(sequences), width, dtype=torch.long)
    real = torch.zeros(len(sequences), width, dtype=torch.bool)
    for i, sequence in enumerate(sequences):
        at = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        tokens[i, at] = _ids(sequence)
        real[i, at] = True
    return tokens.to(device, non_blocking=True), real.to(device, non_blocking=True)


def to_host(found: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Begin to copy a tensor to the host. The function that is returned waits for the copy, not for what follows it."""
    if not found.is_cuda:
        return found, lambda: None
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(found.device))
    return host, copied.synchronize


def _ids(sequence: list[int]) -> Int[Tensor, "T"]:
    """Return token ids as a tensor; twenty times as fast as torch.tensor."""
    try:
        held = array("Q", sequence)  # without a sign it is filled three times as fast
    except OverflowError:
        held = array("q", sequence)  # the id of a segment that the model will refuse
    return torch.frombuffer(held, dtype=torch.int64)
