"""Feeding by compiled kernels: they read the prompts and every token after them."""

import torch
from torch import Tensor

from glassformer.generation.feed import Feed
from glassformer.kernels.cpu.decode.decoder import NativeDecoder
from glassformer.kernels.cpu.decode.pack import Precision
from glassformer.model import DecoderLM
from glassformer.shapes import Float, Int


class NativeFeed(Feed):
    """`Feed`, whose steps are calls of a kernel. Rows need no padding there: each has a length of its own."""

    def __init__(
        self, model: DecoderLM, rows: list[list[int]], max_new_tokens: int, chunk: int | None, precision: Precision
    ):
        super().__init__(model, rows, max_new_tokens, None, chunk)
        self.decoder = NativeDecoder(model, len(rows), self.tokens.shape[1] + max_new_tokens, precision)

    def start(self) -> Float[Tensor, "B V"]:
        """Logits after the prompts."""
        return self.decoder.read(self.rows, self.chunk)

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        return self.decoder.step(tokens)

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        super().reorder(parents)
        self.decoder.reorder(parents)
