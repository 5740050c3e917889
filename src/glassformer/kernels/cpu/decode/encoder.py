"""Texts of unequal length through an encoder without padding: matmuls over real tokens alone, attention per text."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        # the parts, not the model: an encoder that is kept for the next call must not keep a model alive
        self.embed, self.stack, self.library = model.embed, model.encoder, library.load()
        self.threads = threads or max(1, torch.get_num_threads())
        self.weights = weights_of(model, known, "encoder")
        self.tables = Tables(self.weights, self.stack, 1)

    @property
    def copies_weights(self) -> bool:
        """True if a changed weight may be noticed only when the encoder is made again."""
        in_place = {parameter.data_ptr() for parameter in self.stack.parameters()}
        return self.tables.model.biases is not None or any(
            held.data_ptr() not in in_place for held in self.weights.store.held
        )

    @torch.no_grad()
    def encode(
        self, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
    ) -> list[Float[Tensor, "T D"]]:
        """Return the hidden states of each text, after the final norm."""
        longest, tables = max(map(len, texts)), self.tables
        if longest > tables.capacity:
            tables = self.tables = Tables(self.weights, self.stack, 1 << (longest - 1).bit_length())
        states: list[Tensor] = []
        for first, last in _parts([len(text) for text in texts]):
            part = slice(first, last)
            states += self._pass(tables, texts[part], None if segments is None else segments[part])
        return states

    def _pass(
        self, tables: Tables, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None
    ) -> list[Tensor]:
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.tensor([token for text in texts for token in text])
        sequences = torch.repeat_interleave(lengths)
        positions = torch.arange(len(tokens)) - (lengths.cumsum(0) - lengths)[sequences]
        kinds = None if segments is None else torch.tensor([kind for one in segments for kind in one])[None]
        embed, stack = self.embed, self.stack
        embedded = embed(tokens[None]) if kinds is None else embed(tokens[None], kinds)
        given = stack.add_positions(embedded, positions[None])[0].float().contiguous()
        entries = torch.stack([tokens, sequences, positions], 1).to(torch.int32)
        states = torch.empty(len(tokens), tables.model.d_model)
        self.library.glass_encode(
            tables.model, address(entries), len(tokens), address(given), self.threads, address(states)
        )
        return list(states.split(lengths.tolist()))


_LAST: "weakref.WeakKeyDictionary[Any, tuple[Any, NativeEncoder]]" = weakref.WeakKeyDictionary()
"""The encoder that was made last for each model, and the addresses of the weights that it reads in place."""


def native_encoder(model: EncoderLM, modules: list[nn.Module], precision: str) -> NativeEncoder:
    """Return the encoder of a model. If it reads all weights in place, it is made again only if one of them moves.

    `modules` are all modules of the model's embedding and encoder. Making it takes as long as reading some words.
    """
    weights = [p.data_ptr() for module in modules for p in module._parameters.values() if p is not None]
    key = (precision, model.dtype, torch.get_num_threads(), weights)
    found = _LAST.get(model)
    if found is not None and found[0] == key:
        return found[1]
    made = NativeEncoder(model, precision)
    if made.copies_weights:
        _LAST.pop(model, None)
    else:
        _LAST[model] = key, made
    return made


def _parts(lengths: list[int]) -> list[tuple[int, int]]:
    """Divide texts into consecutive parts of at most CHUNK tokens, or of one text."""
    parts, first, used = [], 0, 0
    for i, length in enumerate(lengths):
        if used and used + length > CHUNK:
            parts.append((first, i))
            first, used = i, 0
        used += length
    return [*parts, (first, len(lengths))]
