"""Feeding by CUDA kernels: torch reads the prompts, the kernels every token after them."""

import weakref
from typing import Any

import torch
from torch import Tensor

from glassformer.generation.feed import Feed
from glassformer.generation.sampling import require_numbers
from glassformer.kernels.cuda.decode import batch, decoder
from glassformer.kernels.cuda.decode.batch import CudaBatch
from glassformer.kernels.cuda.decode.decoder import CudaDecoder
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.shapes import Float, Int

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROOM = 256
"""Caches have a multiple of this many places: another generation of about the same length finds one that fits."""


def compile_kernels(model: DecoderLM, rows: int, dtype: torch.dtype) -> None:
    """Compile what decoding these sequences needs, where that was not done before."""
    alone = _alone(model, rows, dtype)
    texts = [decoder.kernel_text(model, dtype)] if alone else list(batch.kernel_texts(model, dtype).values())
    for text in texts:
        nvrtc.compiled(text, torch.cuda.get_device_capability(model.device))


def _alone(model: DecoderLM, rows: int, dtype: torch.dtype) -> bool:
    """Whether the persistent kernel takes it, and not the graph for any number of rows."""
    return rows == 1 and decoder.can_run(model, dtype)


_MADE: "weakref.WeakKeyDictionary[DecoderLM, tuple[Any, CudaDecoder | CudaBatch]]" = weakref.WeakKeyDictionary()


def _decoder(model: DecoderLM, rows: int, capacity: int, dtype: torch.dtype) -> CudaDecoder | CudaBatch:
    """The last one made for this model where it fits, with the weights as they are now."""
    capacity = -(-capacity // ROOM) * ROOM
    held, made = _MADE.get(model, (None, None))
    if made is None or held != (rows, dtype, model.device) or made.capacity < min(capacity, made.limit):
        compile_kernels(model, rows, dtype)
        alone = _alone(model, rows, dtype)
        made = CudaDecoder(model, capacity, dtype=dtype) if alone else CudaBatch(model, rows, capacity, dtype)
        _MADE[model] = ((rows, dtype, model.device), made)
        return made
    made.refresh(model)
    return made


class CudaFeed(Feed):
    """`Feed`, whose steps after the prompt are the kernels'. Rows need no padding there."""

    def __init__(self, model: DecoderLM, rows: list[list[int]], max_new_tokens: int, chunk: int | None, precision: str):
        super().__init__(model, rows, max_new_tokens, None, chunk)
        capacity = self.tokens.shape[1] + max_new_tokens
        self.decoder = _decoder(model, len(rows), capacity, DTYPES[precision])

    def start(self) -> Float[Tensor, "B V"]:
        """Logits after the prompts, of which torch reads all but the last tokens: rows of one length together."""
        for length in sorted({len(row) for row in self.rows}):
            which = [i for i, row in enumerate(self.rows) if len(row) == length]
            kept = self._read([self.rows[i][:-1] for i in which]) if length > 1 else []
            if isinstance(self.decoder, decoder.CudaDecoder):
                self.decoder.take(self.rows[0], [(k[0], v[0]) for k, v in kept])
            else:
                self.decoder.take(which, length - 1, kept)
        last = torch.tensor([row[-1] for row in self.rows], device=self.decoder.device)
        if isinstance(self.decoder, decoder.CudaDecoder):
            return self.decoder.step()[None].clone()
        return self.decoder.step(last)

    def _read(self, rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        assert isinstance(self.model, DecoderLM)
        tokens = torch.tensor(rows, device=self.decoder.device)
        cache = self.model.new_cache("growing")
        size = self.chunk or tokens.shape[1]
        for first in range(0, tokens.shape[1], size):
            self.model(tokens[:, first : first + size], cache=cache)
        layers: list[Any] = list(cache.layers)
        return [(layer.k, layer.v) for layer in layers]

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        if isinstance(self.decoder, decoder.CudaDecoder):
            return self.decoder.step(int(tokens))[None].clone()
        return self.decoder.step(tokens)

    def greedy(self, tokens: Int[Tensor, "B"], count: int) -> list[list[int]]:
        """What comes after the given tokens, each time the likeliest: `count` lists of a token per row."""
        if isinstance(self.decoder, decoder.CudaDecoder):
            self.decoder.tokens[self.decoder.place] = tokens[0]
            steps = [[token] for token in self.decoder.greedy(count).tolist()]
        else:
            steps = self.decoder.greedy(tokens, count).T.tolist()
        last = self.decoder.logits.view(len(self.rows), -1)[:, : self.model.config.vocab_size]
        require_numbers(last, last.argmax(-1))  # what was NaN once stays so: the kept keys are
        return steps

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        raise NotImplementedError  # beam search is torch's on a GPU (loop.py)
