"""A prompt captured as CUDA graphs: its buffers, its padding, and the GPU memory that captured prompts share.

There are two graphs, the first layer and the rest. The more a graph holds, the longer its launch takes: while the first
layer is computed, the rest is launched.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.model.cache import build_cache
from glassformer.shapes import Float, Int

if TYPE_CHECKING:
    from glassformer.kernels.cuda.graph.prompt import PromptReader


class CapturedPrompt:
    """Prompts of one padded length: buffers, and from the second prompt on CUDA graphs that fill them."""

    def __init__(self, reader: "PromptReader", batch: int, length: int):
        device, layers = reader.embed.tokens.weight.device, len(reader.attends)
        self.parts = [part for part in (range(1), range(1, layers)) if part]
        """The layers of each graph."""
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.cache = build_cache(reader.stack.windows, "static", device, length)
        self.context = reader.context(reader.embed(self.tokens), None, self.cache)
        """The same for every prompt, so it is not part of the graphs."""
        self.stored = reader.allocate(self.cache, batch)
        """Keys and values (layers, B, G, length, K or U)."""
        self.stream: Float[Tensor, "B T D"] | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def read(self, reader: "PromptReader", tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return the residual stream after all blocks. It is overwritten by the next prompt."""
        missing = self.tokens.shape[1] - tokens.shape[1]
        # padding is written, too: nothing may depend on the last prompt, not even a NaN
        self.tokens.copy_(F.pad(tokens, (0, missing)) if missing else tokens, non_blocking=True)
        if not self.graphs and self.stream is not None and self.tokens.is_cuda:
            self._capture(reader)
        for graph in self.graphs:
            graph.replay()
        for layers in () if self.graphs else self.parts:
            self._compute(reader, layers)
        assert self.stream is not None
        return self.stream

    def _compute(self, reader: "PromptReader", layers: range) -> None:
        """Compute the residual stream after some layers."""
        reader.sides, reader.joint = reader.streams[1:], reader.joint_weights(self.tokens.numel())
        try:
            x: Any = self.stream if layers.start else reader.embed(self.tokens)
            self.stream = reader.compute(x, lambda: self.context, self.cache, layers)
        finally:
            reader.sides, reader.joint = [], {}

    def _capture(self, reader: "PromptReader") -> None:
        """Capture what the first prompt has computed. Nothing is computed meanwhile."""
        side, graphs = reader.streams[0], list[torch.cuda.CUDAGraph]()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for layers in self.parts:
                graph = torch.cuda.CUDAGraph()
                pool = graphs[0].pool() if graphs else shared_pool(reader.prompts.values())
                # not torch.cuda.graph, which collects garbage and returns unused memory: some tenths of a second
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._compute(reader, layers)
                finally:
                    graph.capture_end()
                graphs.append(graph)
        torch.cuda.current_stream().wait_stream(side)
        self.graphs = graphs


def shared_pool(prompts: Iterable[CapturedPrompt]) -> Any:
    """Return the GPU memory in which captured prompts compute, one after the other; None if none is captured.

    Memory that no graph uses any more may not be used again: the prompt that was captured first may be gone.
    """
    return next((graph.pool() for prompt in prompts for graph in prompt.graphs), None)


def padded_length(tokens: int, most: int | None, changes_at: int | None) -> int:
    """Return the length to which a prompt is padded: at most an eighth more, or a multiple of 64 if it is short.

    `most`: positions of the model. `changes_at`: longer prompts than this have other frequencies.
    """
    step = max(64, 1 << tokens.bit_length() >> 4)
    length = -(-tokens // step) * step
    limits = [limit for limit in (most, changes_at) if limit is not None and limit >= tokens]
    return min(length, *limits) if limits else length
