"""Decoding one sequence on a GPU: torch reads the prompt, the persistent kernel computes every token after it."""

import weakref
from typing import Any

import torch
from torch import Tensor

from glassformer.kernels.cuda.decode import decoder
from glassformer.kernels.cuda.decode.decoder import CudaDecoder
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.shapes import Float, Int

CAPACITY_STEP = 256
"""Capacities are rounded up to a multiple of this, so that a generation of similar length reuses the last decoder."""

_LAST: "weakref.WeakKeyDictionary[DecoderLM, tuple[Any, CudaDecoder]]" = weakref.WeakKeyDictionary()
"""The decoder that was made last for each model, and (dtype, device) that it was made for."""


class PersistentSession:
    """One sequence, decoded by the persistent kernel."""

    owns_threads = False

    def __init__(self, model: DecoderLM, kernel: CudaDecoder):
        self.model, self.kernel = model, kernel

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "1 V"]:
        """Return the logits after the prompt. Torch reads all but its last token."""
        (prompt,) = prompts
        self.kernel.take(prompt, self._prefill(prompt[:-1], chunk))
        return self.kernel.step()[None].clone()

    def _prefill(self, prompt: list[int], chunk: int | None) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values (G, T, K) of each layer after a prompt; none for length 0."""
        tokens = torch.tensor([prompt], device=self.model.device, dtype=torch.long)
        if not prompt:
            return []
        cache = self.model.new_cache("growing")
        for part in tokens.split(chunk or len(prompt), 1):
            self.model(part, cache=cache)
        layers: list[Any] = list(cache.layers)
        return [(layer.k[0], layer.v[0]) for layer in layers]

    def step(self, tokens: Int[Tensor, "1"]) -> Float[Tensor, "1 V"]:
        return self.kernel.step(int(tokens))[None].clone()

    def greedy(self, tokens: Int[Tensor, "1"], count: int) -> tuple[list[list[int]], Float[Tensor, "1 V"]]:
        """Return the `count` tokens after the given one, each the most likely, and the last logits."""
        self.kernel.tokens[self.kernel.position] = tokens[0]
        steps = [[token] for token in self.kernel.greedy(count).tolist()]
        return steps, self.kernel.logits[None]

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        raise NotImplementedError  # the registry refuses beam search with this kernel


def persistent_session(model: DecoderLM, capacity: int, dtype: torch.dtype) -> PersistentSession:
    """Return a session for one sequence, compiled if it was not before."""
    made = _reusable(model, capacity, dtype)
    if made is None:
        nvrtc.compiled(decoder.kernel_text(model, dtype), torch.cuda.get_device_capability(model.device))
        made = CudaDecoder(model, _rounded(capacity), dtype=dtype)
        _LAST[model] = ((dtype, model.device), made)
    return PersistentSession(model, made)


def _rounded(capacity: int) -> int:
    return -(-capacity // CAPACITY_STEP) * CAPACITY_STEP


def _reusable(model: DecoderLM, capacity: int, dtype: torch.dtype) -> CudaDecoder | None:
    """Return the decoder that was made last for this model if it fits, with the present weights; otherwise None."""
    made_for, made = _LAST.get(model, (None, None))
    if made is None or made_for != (dtype, model.device) or made.capacity < min(_rounded(capacity), made.limit):
        return None
    made.refresh(model)
    return made
