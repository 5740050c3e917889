"""The KV cache of a captured decode step: fixed buffers, and the number of tokens in them on the device."""

import torch
from torch import Tensor

from glassformer.model.cache import Cache, Growing, Static
from glassformer.shapes import Bool, Int


class CapturedCache(Cache):
    """A cache whose next token has the index `slot`, a number on the device that a replayed graph advances.

    Sequences are padded on the left: they end at the same slot, and sequence b begins at slot start[b].
    """

    def __init__(self, filled: Cache, slots: int, batch: int):
        """Take over the buffers of a static cache, or copy a growing one into buffers of `slots` tokens."""
        super().__init__(filled.device, slots, fixed=True)
        self.slots, self.batch = slots, batch
        self.slot = torch.zeros((), dtype=torch.long, device=filled.device)
        self.start = torch.zeros(batch, dtype=torch.int32, device=filled.device)
        self.cross = filled.cross
        for layer in filled.layers:
            assert isinstance(layer, Static | Growing)
            assert layer.k is not None
            assert layer.v is not None
            made = Static(self, slots, fixed=True)
            made.k, made.v = self._room(layer.k, slots), self._room(layer.v, slots)
            self.layers.append(made)
        self.take(filled)

    def _room(self, held: Tensor, slots: int) -> Tensor:
        """The buffer itself if it is long enough, or a longer copy."""
        if held.shape[2] == slots and held.is_contiguous():
            return held
        made = held.new_zeros(held.shape[0], held.shape[1], slots, held.shape[3])
        made[:, :, : held.shape[2]] = held
        return made

    def take(self, filled: Cache) -> None:
        """Continue from what another cache of as many sequences holds."""
        for mine, layer in zip(self.layers, filled.layers, strict=True):
            assert isinstance(mine, Static)
            assert isinstance(layer, Static | Growing)
            for to, held in ((mine.k, layer.k), (mine.v, layer.v)):
                assert to is not None
                assert held is not None
                if to is not held:
                    length = min(filled.length, held.shape[2])
                    to[:, :, :length] = held[:, :, :length]
        self.cross = filled.cross
        self.slot.fill_(filled.length)
        self.length = filled.length
        self.start.zero_()
        if filled.real is not None:
            self.start.copy_((~filled.real).sum(1))

    def positions_now(self) -> Int[Tensor, "B 1"]:
        """The position of the new token of each sequence."""
        return (self.slot - self.start)[:, None]

    def append(
        self, new: int, positions: Int[Tensor, "#B T"] | None = None, real: Bool[Tensor, "B T"] | None = None
    ) -> Int[Tensor, "#B T"]:
        self.new = new
        return self.positions_now()

    def query_index(self) -> Int[Tensor, "T"]:
        return self.slot[None]

    def last_position(self, new: Int[Tensor, "#B T"]) -> int | None:
        return self.slots - 1

    def key_positions(self) -> Int[Tensor, "#B S"]:
        return (self.key_index() - self.start[:, None]).clamp(min=0)

    def key_real(self) -> Bool[Tensor, "B S"] | None:
        return self.key_index() >= self.start[:, None]

    @torch.no_grad()
    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        """Sequence i becomes a copy of the present sequence rows[i]; the addresses stay."""
        for layer in self.layers:
            assert isinstance(layer, Static)
            for held in (layer.k, layer.v):
                assert held is not None
                held.copy_(held.index_select(0, rows))
        for kv in self.cross:
            for held in kv or ():
                held.copy_(held.index_select(0, rows))
        self.start.copy_(self.start.index_select(0, rows))
