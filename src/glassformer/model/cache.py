"""The KV cache: keys and values of earlier tokens, so that a new token costs one position and not a whole pass.

A `Cache` holds one layer cache per layer, plus what all layers share: the number of tokens, which of them are real, and
their positions. The model calls `append` once per forward pass, before the layers run; each layer then calls `extend`.

Kinds of layer cache: `Growing` (concatenates; gradients flow), `Static` (writes into preallocated buffers; no
gradients), `Windowed` (keeps what a sliding window can still attend to).
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from glassformer.config.choices import CacheKind
from glassformer.shapes import Bool, Float, Int

KV = tuple[Tensor, Tensor]


@runtime_checkable
class LayerCache(Protocol):
    """Keys (B,G,S,K) and values (B,G,S,U) of one layer. The last position returned by `extend` is the newest token."""

    def extend(self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"]) -> KV: ...

    def crop(self, length: int, dropped: int) -> None: ...

    def reorder(self, rows: Int[Tensor, "N"]) -> None: ...

    def n_bytes(self) -> int: ...


class Growing:
    """Concatenate old and new: simple and differentiable, but it copies everything at each step."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"]) -> KV:
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = k, v
        return k, v

    def crop(self, length: int, dropped: int) -> None:
        if self.k is not None and self.v is not None:
            # copied, not viewed: a view would keep the dropped tokens' memory alive
            self.k, self.v = self.k[:, :, :length].clone(), self.v[:, :, :length].clone()

    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)

    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v) if t is not None)


class Windowed(Growing):
    """Growing, but drops what no later query can attend to; keeps `slack` tokens more, so that `crop` can roll back."""

    def __init__(self, window: int, slack: int):
        super().__init__()
        self.keep, self.slack = window - 1 + slack, slack

    def extend(self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"]) -> KV:
        k, v = super().extend(k, v)
        if k.shape[2] > self.keep:
            first = k.shape[2] - self.keep
            self.k, self.v = k[:, :, first:].clone(), v[:, :, first:].clone()
        return k, v

    def crop(self, length: int, dropped: int) -> None:
        held = 0 if self.k is None else self.k.shape[2]
        if dropped > self.slack and held < length + dropped:
            raise ValueError(
                f"cannot crop {dropped} tokens off a windowed cache that keeps {self.slack} beyond its window: "
                f"they are gone. Create the cache with slack={dropped} or more, or use a growing one."
            )
        super().crop(held - dropped, dropped)


class Static:
    """Buffers of a fixed capacity, written in place.

    With `fixed` the whole buffer is returned (masked by index), so that shapes never change and a CUDA graph can replay
    the step; without it a view of the filled part is, which reads less.
    """

    def __init__(self, cache: "Cache", capacity: int, fixed: bool):
        self.cache, self.capacity, self.fixed = cache, capacity, fixed
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"]) -> KV:
        if torch.is_grad_enabled() and k.requires_grad:
            raise ValueError(
                "a static cache writes in place and carries no gradients: call under torch.no_grad(), "
                "or use a growing one."
            )
        if self.k is None or self.v is None:
            self.k = k.new_zeros(k.shape[0], k.shape[1], self.capacity, k.shape[3])
            self.v = v.new_zeros(v.shape[0], v.shape[1], self.capacity, v.shape[3])
        slots = self.cache.query_index()
        self.k.index_copy_(2, slots, k)
        self.v.index_copy_(2, slots, v)
        if self.fixed:
            return self.k, self.v
        return self.k[:, :, : self.cache.length], self.v[:, :, : self.cache.length]

    def enlarge(self, capacity: int) -> None:
        """Copy the buffers into larger ones."""
        more, self.capacity = capacity - self.capacity, capacity
        if self.k is not None and self.v is not None:
            self.k, self.v = (torch.nn.functional.pad(held, (0, 0, 0, more)) for held in (self.k, self.v))

    def crop(self, length: int, dropped: int) -> None:
        """Nothing to do: what lies beyond the length is never looked at, and is overwritten next."""

    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)

    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v) if t is not None)


class Cache:
    """The KV cache of a batch. `len(cache)` tokens are in it; `crop` rolls back; `reorder` follows beams."""

    def __init__(self, device: torch.device, capacity: int | None = None, fixed: bool = False):
        self.device, self.capacity, self.fixed = device, capacity, fixed
        self.layers: list[LayerCache] = []
        self.cross: list[KV | None] = []
        """Keys and values of the encoder's output, per layer; filled at the first decoder step."""
        self.length = 0
        self.new = 0
        """Tokens of the current (or last) forward pass: they have the indices length - new to length - 1."""
        self.counter = torch.zeros((), dtype=torch.long, device=device) if fixed else None
        """`length` before the current forward pass, on the device, where a captured CUDA graph can advance it."""
        self.positions: Tensor | None = None
        """(B, length) position ids; None while they are 0, 1, 2, ... in every sequence."""
        self.real: Tensor | None = None
        """(B, length), False at padding; None while all tokens are real."""

    def __len__(self) -> int:
        return self.length

    @property
    def n_keys(self) -> int:
        """Number of key positions: those filled, or the whole buffer if shapes are fixed."""
        return self.capacity if self.fixed and self.capacity else self.length

    def append(
        self, new: int, positions: Int[Tensor, "#B T"] | None = None, real: Bool[Tensor, "B T"] | None = None
    ) -> Int[Tensor, "#B T"]:
        """Record `new` tokens and return their positions: those given, or counted on from the last real token."""
        if self.capacity is not None:
            self._require_room(new, self.capacity)
        if positions is not None or real is not None or self.positions is not None or self.real is not None:
            positions = self._append_explicit(new, positions, real)
        if self.counter is not None:
            self.counter += self.new
        self.length, self.new = self.length + new, new
        return self.query_index()[None] if positions is None else positions

    def _require_room(self, new: int, capacity: int) -> None:
        if self.length + new > capacity:
            raise ValueError(
                f"{new} tokens do not fit a cache of capacity {capacity} that holds {self.length}. "
                "Make the cache larger, or crop it first."
            )

    def _append_explicit(
        self, new: int, positions: Int[Tensor, "#B T"] | None, real: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "#B T"]:
        """Keep position ids and the padding mask of every token, once they are not simply 0, 1, 2, ..."""
        counted = positions is None and real is None and self.positions is None
        if positions is None:
            ahead = torch.arange(new, device=self.device)[None] if real is None else real.long().cumsum(1) - 1
            positions = (self.next_position() + ahead).clamp(min=0)
        if not counted:
            self.positions = _append(self._known_positions(), positions)
        if real is not None or self.real is not None:
            held = self.real
            if held is None:
                rows = 1 if real is None else real.shape[0]
                held = torch.ones(rows, self.length, dtype=torch.bool, device=self.device)
            real = torch.ones(held.shape[0], new, dtype=torch.bool, device=self.device) if real is None else real
            self.real = _append(held, real)
        return positions

    def next_position(self) -> Int[Tensor, "#B 1"]:
        """The position of the next real token: one more than the largest position of each sequence."""
        if self.positions is None:
            return torch.full((1, 1), self.length, device=self.device)
        held = self.positions if self.real is None else self.positions.masked_fill(~self.real, -1)
        if held.shape[1] == 0:
            return held.new_zeros(held.shape[0], 1)
        return held.max(dim=1, keepdim=True).values + 1

    def last_position(self, new: Int[Tensor, "#B T"]) -> int | None:
        """The largest position so far, where it is known without waiting for a device."""
        if self.positions is None:
            return self.n_keys - 1  # a captured step is replayed at later positions, up to the end of the buffer
        if new.device.type != "cpu" or torch.compiler.is_compiling() or int(new.min()) < 0:
            return None
        return int(new.max())

    def query_index(self) -> Int[Tensor, "T"]:
        """Indices of the new tokens."""
        if self.counter is not None:
            return torch.arange(self.new, device=self.device) + self.counter
        return torch.arange(self.length - self.new, self.length, device=self.device)

    def key_index(self) -> Int[Tensor, "S"]:
        """Indices of all keys."""
        return torch.arange(self.n_keys, device=self.device)

    def key_positions(self) -> Int[Tensor, "#B S"]:
        if self.positions is None:
            return self.key_index()[None]
        return self._padded(self.positions)

    def key_real(self) -> Bool[Tensor, "B S"] | None:
        return None if self.real is None else self._padded(self.real)

    def _padded(self, held: Tensor) -> Tensor:
        missing = self.n_keys - held.shape[1]
        return torch.nn.functional.pad(held, (0, missing)) if missing else held

    def _known_positions(self) -> Tensor:
        return torch.arange(self.length, device=self.device)[None] if self.positions is None else self.positions

    def crop(self, length: int) -> None:
        """Drop everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} tokens: the cache holds {self.length}.")
        dropped = self.length - length
        if dropped == 0:
            return
        for layer in self.layers:
            layer.crop(length, dropped)
        self.positions = None if self.positions is None else self.positions[:, :length]
        self.real = None if self.real is None else self.real[:, :length]
        self.length, self.new = length, 0
        if self.counter is not None:
            self.counter.fill_(length)

    def enlarge(self, capacity: int) -> None:
        """Give a static cache room for `capacity` tokens. What it holds stays."""
        for layer in self.layers:
            if isinstance(layer, Static):
                layer.enlarge(capacity)
        self.capacity = capacity

    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        """Sequence i becomes a copy of the present sequence rows[i]: a beam follows its parent."""
        for layer in self.layers:
            layer.reorder(rows)
        self.cross = [kv and (kv[0].index_select(0, rows), kv[1].index_select(0, rows)) for kv in self.cross]
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions.index_select(0, rows)
        if self.real is not None and self.real.shape[0] > 1:
            self.real = self.real.index_select(0, rows)

    def n_bytes(self) -> int:
        """Bytes held in keys and values, cross-attention's included."""
        cross = sum(t.numel() * t.element_size() for kv in self.cross if kv for t in kv)
        return cross + sum(layer.n_bytes() for layer in self.layers)


def _append(held: Tensor, new: Tensor) -> Tensor:
    rows = max(held.shape[0], new.shape[0])
    return torch.cat([held.expand(rows, -1), new.expand(rows, -1)], dim=1)


def build_cache(
    windows: list[int | None],
    kind: CacheKind,
    device: torch.device,
    capacity: int | None = None,
    slack: int = 0,
    fixed: bool = False,
    n_cross: int = 0,
) -> Cache:
    """Create an empty cache for layers with these windows (None: unlimited)."""
    if kind == "static" and capacity is None:
        raise ValueError("a static cache has a fixed size: pass capacity, the maximum number of tokens.")
    if kind == "windowed" and all(w is None for w in windows):
        raise ValueError("a windowed cache needs layers with a window, and no layer of this model has one.")
    if kind not in ("growing", "static", "windowed"):
        raise ValueError(f"cache kind {kind!r} is not supported. Use 'growing', 'static' or 'windowed'.")
    cache = Cache(device, capacity if kind == "static" else None, fixed and kind == "static")
    for width in windows:
        if kind == "static":
            assert capacity is not None
            cache.layers.append(Static(cache, capacity, fixed))
        else:
            cache.layers.append(Windowed(width, slack) if kind == "windowed" and width else Growing())
    cache.cross = [None] * n_cross
    return cache
