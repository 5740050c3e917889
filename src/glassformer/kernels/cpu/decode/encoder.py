"""Texts of unequal length through an encoder without padding: matmuls over real tokens alone, attention per text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.pack import address
from glassformer.kernels.cpu.decode.stack import Tables, checked, weights_of
from glassformer.model import EncoderLM, Seq2Seq
from glassformer.shapes import Float

CHUNK = 2048
"""Tokens that are computed at once, unless one text has more: all their hidden activations are in memory."""


class NativeEncoder:
    """The encoder of a model as compiled kernels. torch computes embeddings, which are a hundredth of the work."""

    def __init__(self, model: EncoderLM | Seq2Seq, precision: str = "float32", threads: int | None = None):
        known = checked(model, precision, "use the model itself")
        self.model, self.library = model, library.load()
        self.threads = threads or max(1, torch.get_num_threads())
        self.weights = weights_of(model, known, "encoder")
        self.tables = Tables(self.weights, model.encoder, 1)

    @torch.no_grad()
    def encode(
        self, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
    ) -> list[Float[Tensor, "T D"]]:
        """Return the hidden states of each text, after the final norm."""
        longest = max(map(len, texts))
        if longest > self.tables.capacity:
            self.tables = Tables(self.weights, self.model.encoder, 1 << (longest - 1).bit_length())
        states: list[Tensor] = []
        for first, last in _parts([len(text) for text in texts]):
            part = slice(first, last)
            states += self._pass(texts[part], None if segments is None else segments[part])
        return states

    def _pass(self, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None) -> list[Tensor]:
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.tensor([token for text in texts for token in text])
        sequences = torch.repeat_interleave(lengths)
        positions = torch.arange(len(tokens)) - (lengths.cumsum(0) - lengths)[sequences]
        kinds = None if segments is None else torch.tensor([kind for one in segments for kind in one])[None]
        embed, stack = self.model.embed, self.model.encoder
        embedded = embed(tokens[None]) if kinds is None else embed(tokens[None], kinds)
        given = stack.add_positions(embedded, positions[None])[0].float().contiguous()
        entries = torch.stack([tokens, sequences, positions], 1).to(torch.int32)
        states = torch.empty(len(tokens), self.model.config.d_model)
        self.library.glass_encode(
            self.tables.model, address(entries), len(tokens), address(given), self.threads, address(states)
        )
        return list(states.split(lengths.tolist()))


def _parts(lengths: list[int]) -> list[tuple[int, int]]:
    """Divide texts into consecutive parts of at most CHUNK tokens, or of one text."""
    parts, first, used = [], 0, 0
    for i, length in enumerate(lengths):
        if used and used + length > CHUNK:
            parts.append((first, i))
            first, used = i, 0
        used += length
    return [*parts, (first, len(lengths))]
