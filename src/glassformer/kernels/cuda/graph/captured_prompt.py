"""A prompt captured as a CUDA graph: its buffers, its padding, and the GPU memory that captured prompts share."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.model.cache import build_cache
from glassformer.shapes import Float, Int

if TYPE_CHECKING:
    from glassformer.kernels.cuda.graph.prompt import PromptReader


class CapturedPrompt:
    """Prompts of one padded length: buffers, and from the second prompt on a CUDA graph that fills them."""

    def __init__(self, reader: "PromptReader", batch: int, length: int, device: torch.device):
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.cache = build_cache(reader.stack.windows, "static", device, length)
        self.context = reader.context(reader.embed(self.tokens), None, self.cache)
        """The same for every prompt, so it is not part of the graph."""
        self.stored = reader.allocate(self.cache, batch)
        """Keys and values (layers, B, G, length, K or U)."""
        self.stream: Float[Tensor, "B T D"] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def read(self, reader: "PromptReader", tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return the residual stream after all blocks. It is overwritten by the next prompt."""
        new = tokens.shape[1]
        self.tokens[:, :new] = tokens
        if new < self.tokens.shape[1]:
            self.tokens[:, new:] = 0  # nothing may depend on the last prompt, not even a NaN
        if self.graph is None and self.stream is not None and tokens.is_cuda:
            self._capture(reader)
        if self.graph is None:
            self.stream = self._compute(reader)
        else:
            self.graph.replay()
        assert self.stream is not None
        return self.stream

    def _compute(self, reader: "PromptReader") -> Float[Tensor, "B T D"]:
        reader.sides, reader.joint = reader.streams[1:], reader.joint_weights(self.tokens.numel())
        try:
            return reader.compute(reader.embed(self.tokens), self.context, self.cache)
        finally:
            reader.sides, reader.joint = [], {}

    def _capture(self, reader: "PromptReader") -> None:
        """Capture what the first prompt has computed. Nothing is computed meanwhile."""
        graph, side = torch.cuda.CUDAGraph(), reader.streams[0]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # not torch.cuda.graph, which collects garbage and returns unused memory: some tenths of a second
            graph.capture_begin(pool=shared_pool(reader.prompts.values()), capture_error_mode="thread_local")
            try:
                self.stream = self._compute(reader)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = graph


def shared_pool(prompts: Iterable[CapturedPrompt]) -> Any:
    """Return the GPU memory in which captured prompts compute, one after the other; None if none is captured.

    Memory that no graph uses any more may not be used again: the prompt that was captured first may be gone.
    """
    return next((prompt.graph.pool() for prompt in prompts if prompt.graph is not None), None)


def padded_length(tokens: int, most: int | None, changes_at: int | None) -> int:
    """Return the length to which a prompt is padded: at most an eighth more, or a multiple of 64 if it is short.

    `most`: positions of the model. `changes_at`: longer prompts than this have other frequencies.
    """
    step = max(64, 1 << tokens.bit_length() >> 4)
    length = -(-tokens // step) * step
    limits = [limit for limit in (most, changes_at) if limit is not None and limit >= tokens]
    return min(length, *limits) if limits else length
