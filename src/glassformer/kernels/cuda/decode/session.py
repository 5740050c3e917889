"""Decoding on a GPU: torch reads the prompts, the CUDA kernels compute every token after them."""

import threading
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from glassformer.kernels.cuda.decode import batch, decoder
from glassformer.kernels.cuda.decode.batch import CudaBatch
from glassformer.kernels.cuda.decode.decoder import CudaDecoder
from glassformer.kernels.cuda.graph.prompt import prompt_reader
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.shapes import Float, Int

CAPACITY_STEP = 256
"""Capacities are rounded up to a multiple of this, so that a generation of similar length reuses the last decoder."""

_CHOOSING = threading.Lock()
"""Held while a decoder is chosen: two threads must not get the same one."""
_LAST: "weakref.WeakKeyDictionary[DecoderLM, tuple[Any, CudaDecoder | CudaBatch]]" = weakref.WeakKeyDictionary()
"""The decoder that was made last for each model, and (class, sequences, dtype, device) that it was made for."""


class Session:
    """The common part of both sessions: reading prompts with torch."""

    owns_threads = False

    def __init__(self, model: DecoderLM):
        self.model = model

    def _prefill(self, prompts: list[list[int]], chunk: int | None) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values (B, G, T, K) of each layer after prompts of one length; none for length 0."""
        tokens = torch.tensor(prompts, device=self.model.device)
        if tokens.shape[1] == 0:
            return []
        reader = prompt_reader(self.model)
        cache = self.model.new_cache("static", capacity=tokens.shape[1])
        for part in tokens.split(chunk or tokens.shape[1], 1):
            x = self.model.embed(part)
            self.model.decoder(x, cache=cache) if reader is None else reader(x, None, cache)
        layers: list[Any] = list(cache.layers)
        return [(layer.k, layer.v) for layer in layers]

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        raise NotImplementedError  # the registry refuses beam search on a GPU


class PersistentSession(Session):
    """One sequence, decoded by the persistent kernel."""

    def __init__(self, model: DecoderLM, kernel: CudaDecoder):
        super().__init__(model)
        self.kernel = kernel

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "1 V"]:
        """Return the logits after the prompt. Torch reads all but its last token."""
        (prompt,) = prompts
        self.kernel.take(prompt, [(k[0], v[0]) for k, v in self._prefill([prompt[:-1]], chunk)])
        return self.kernel.step()[None].clone()

    def step(self, tokens: Int[Tensor, "1"]) -> Float[Tensor, "1 V"]:
        return self.kernel.step(int(tokens))[None].clone()

    def greedy(self, tokens: Int[Tensor, "1"], count: int) -> tuple[Int[Tensor, "N 1"], Float[Tensor, "1 V"]]:
        """Return the `count` tokens after the given one, each the most likely, and the last logits."""
        self.kernel.tokens[self.kernel.position] = tokens[0]
        return self.kernel.greedy(count)[:, None], self.kernel.logits[None]


class BatchSession(Session):
    """Any number of sequences, decoded by a CUDA graph. Sequences need no padding."""

    def __init__(self, model: DecoderLM, kernel: CudaBatch):
        super().__init__(model)
        self.kernel = kernel

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "B V"]:
        """Return the logits after the prompts. Torch reads all but their last tokens, equal lengths together."""
        for length in sorted({len(prompt) for prompt in prompts}):
            which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            self.kernel.take(which, length - 1, self._prefill([prompts[i][:-1] for i in which], chunk))
        return self.kernel.step(torch.tensor([prompt[-1] for prompt in prompts], device=self.kernel.device))

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        return self.kernel.step(tokens)

    def greedy(self, tokens: Int[Tensor, "B"], count: int) -> tuple[Int[Tensor, "N B"], Float[Tensor, "B V"]]:
        """Return the `count` tokens after the given ones, each the most likely, and the last logits."""
        return self.kernel.greedy(tokens, count).T, self.kernel.logits[:, : self.kernel.config.vocab_size]


def persistent_session(model: DecoderLM, capacity: int, dtype: torch.dtype) -> PersistentSession:
    """Return a session for one sequence, compiled if it was not before."""
    with _CHOOSING:
        made = _reusable(model, CudaDecoder, 1, capacity, dtype)
        if made is None:
            _compile(model, [decoder.kernel_text(model, dtype)])
            made = CudaDecoder(model, _rounded(capacity), dtype=dtype)
            _LAST[model] = ((CudaDecoder, 1, dtype, model.device), made)
        return _used(PersistentSession(model, made))


def batch_session(model: DecoderLM, sequences: int, capacity: int, dtype: torch.dtype) -> BatchSession:
    """Return a session for any number of sequences, compiled if it was not before."""
    with _CHOOSING:
        made = _reusable(model, CudaBatch, sequences, capacity, dtype)
        if made is None:
            _compile(model, list(batch.kernel_texts(model, dtype).values()))
            made = CudaBatch(model, sequences, _rounded(capacity), dtype)
            _LAST[model] = ((CudaBatch, sequences, dtype, model.device), made)
        return _used(BatchSession(model, made))


S = TypeVar("S", PersistentSession, BatchSession)


def _used(session: S) -> S:
    """Note that a session uses its decoder: no other one gets it as long as this exists."""
    session.kernel.user = weakref.ref(session)
    return session


def _rounded(capacity: int) -> int:
    return -(-capacity // CAPACITY_STEP) * CAPACITY_STEP


def _compile(model: DecoderLM, sources: list[str]) -> None:
    for source in sources:
        nvrtc.compiled(source, torch.cuda.get_device_capability(model.device))


def _reusable(model: DecoderLM, kind: Any, sequences: int, capacity: int, dtype: torch.dtype) -> Any | None:
    """Return the decoder that was made last for this model if it fits, with the present weights; otherwise None."""
    made_for, made = _LAST.get(model, (None, None))
    if made is None or made_for != (kind, sequences, dtype, model.device):
        return None
    if made.user is not None and made.user() is not None:
        return None
    if made.capacity < min(_rounded(capacity), made.limit):
        return None
    made.refresh(model)
    return made
