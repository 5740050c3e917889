"""Feeding by compiled kernels: the engine reads the prompts, the kernels every token after them."""

import torch
from torch import Tensor

from glassformer.generate.feed import Feed
from glassformer.generate.native.decoder import NativeDecoder
from glassformer.generate.native.pack import Precision
from glassformer.model import DecoderLM
from glassformer.model.cache import Growing, Static
from glassformer.shapes import Float, Int


class NativeFeed(Feed):
    """`Feed`, whose steps are calls of a kernel. Rows need no padding there: each has a length of its own."""

    def __init__(
        self, model: DecoderLM, rows: list[list[int]], max_new_tokens: int, chunk: int | None, precision: Precision
    ):
        super().__init__(model, rows, max_new_tokens, "static", chunk)
        self.decoder = NativeDecoder(model, len(rows), self.tokens.shape[1] + max_new_tokens, precision)

    def start(self) -> Float[Tensor, "B V"]:
        """Logits after the prompts; then their keys and values change hands."""
        logits = super().start()
        assert self.cache is not None
        length = self.tokens.shape[1]
        for layer, store in enumerate(self.cache.layers):
            assert isinstance(store, Static | Growing)
            assert store.k is not None
            assert store.v is not None
            for row in range(len(self.tokens)):
                real = slice(None) if self.real is None else self.real[row]
                self.decoder.take(row, layer, store.k[row, :, :length][:, real], store.v[row, :, :length][:, real])
        self.cache = None  # its memory is not needed any more
        return logits

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        return self.decoder.step(tokens)

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        super().reorder(parents)
        self.decoder.reorder(parents)
