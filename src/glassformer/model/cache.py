"""Keys and values of tokens already seen, so that a new token costs one row and not a whole pass.

A `Cache` holds one store per layer plus what all layers share: how many tokens came, which were real, where they stood.
The model calls `append` once per forward, before the layers run; each layer then calls its store's `extend`.

Kinds of store: `Growing` (concatenates; gradients flow), `Static` (writes into buffers made once; no gradients),
`Windowed` (keeps what a sliding window can still see).
"""

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from glassformer.shapes import Bool, Float, Int

CacheKind = Literal["growing", "static", "windowed"]
KV = tuple[Tensor, Tensor]


@runtime_checkable
class Store(Protocol):
    """One layer's keys (B,G,S,K) and values (B,G,S,U). The last column returned by `extend` is the newest token."""

    def extend(self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"]) -> KV: ...

    def crop(self, length: int, dropped: int) -> None: ...

    def reorder(self, rows: Int[Tensor, "N"]) -> None: ...

    def n_bytes(self) -> int: ...


class Growing:
    """Concatenates. Simple, differentiable, and a copy of everything at each step."""

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
    """Growing, but forgets what no later query can see; keeps `slack` tokens more, so that `crop` can roll back."""

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
                f"they are forgotten. Make the cache with slack={dropped} or more, or use a growing one."
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

    def crop(self, length: int, dropped: int) -> None:
        """Nothing to do: what lies beyond the length is never looked at, and is overwritten next."""

    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)

    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v) if t is not None)


class Cache:
    """The memory of one sequence batch. `len(cache)` tokens are in it; `crop` rolls back; `reorder` follows beams."""

    def __init__(self, device: torch.device, capacity: int | None = None, fixed: bool = False):
        self.device, self.capacity, self.fixed = device, capacity, fixed
        self.layers: list[Store] = []
        self.cross: list[KV | None] = []
        """Keys and values of the encoder's output, per layer; filled at the first decoder step."""
        self.length = 0
        self.new = 0
        """Tokens of the forward under way (or the last one): they occupy the indices length - new to length."""
        self.counter = torch.zeros((), dtype=torch.long, device=device) if fixed else None
        """`length` before the current forward, on the device, where a captured graph can read and advance it."""
        self.positions: Tensor | None = None
        """(B, length) position numbers; None while they are 0, 1, 2, ... in every row."""
        self.real: Tensor | None = None
        """(B, length), False at padding; None while all tokens are real."""

    def __len__(self) -> int:
        return self.length

    def append(self, new: int, positions: Int[Tensor, "#B T"] | None, real: Bool[Tensor, "B T"] | None) -> None:
        """Take note of `new` tokens. `positions` and `real` are None when they merely go on counting."""
        if self.capacity is not None and self.length + new > self.capacity:
            raise ValueError(
                f"{new} tokens do not fit a cache of capacity {self.capacity} that holds {self.length}. "
                "Make the cache larger, or crop it first."
            )
        if positions is not None or self.positions is not None:
            positions = self.default_positions(new) if positions is None else positions
            self.positions = _append(self._known_positions(), positions)
        if real is not None or self.real is not None:
            held = self.real
            if held is None:
                rows = 1 if real is None else real.shape[0]
                held = torch.ones(rows, self.length, dtype=torch.bool, device=self.device)
            real = torch.ones(held.shape[0], new, dtype=torch.bool, device=self.device) if real is None else real
            self.real = _append(held, real)
        if self.counter is not None:
            self.counter += self.new
        self.length, self.new = self.length + new, new

    def default_positions(self, new: int) -> Int[Tensor, "#B T"]:
        """Positions of the next `new` real tokens: they go on from the largest position of each row."""
        ahead = torch.arange(new, device=self.device)[None]
        return self.next_position() + ahead

    def next_position(self) -> Int[Tensor, "#B 1"]:
        if self.positions is None:
            return torch.full((1, 1), self.length, device=self.device)
        held = self.positions if self.real is None else self.positions.masked_fill(~self.real, -1)
        if held.shape[1] == 0:
            return held.new_zeros(held.shape[0], 1)
        return held.max(dim=1, keepdim=True).values + 1

    def query_index(self) -> Int[Tensor, "T"]:
        """Indices of the tokens of the current forward."""
        ahead = torch.arange(self.new, device=self.device)
        return ahead + (self.length - self.new if self.counter is None else self.counter)

    def key_index(self) -> Int[Tensor, "S"]:
        """Indices of all keys: those seen, or the whole buffer when shapes are fixed."""
        return torch.arange(self.capacity if self.fixed and self.capacity else self.length, device=self.device)

    def key_positions(self) -> Int[Tensor, "#B S"]:
        if self.positions is None:
            return self.key_index()[None]
        return self._padded(self.positions)

    def key_real(self) -> Bool[Tensor, "B S"] | None:
        return None if self.real is None else self._padded(self.real)

    def _padded(self, held: Tensor) -> Tensor:
        missing = len(self.key_index()) - held.shape[1]
        return torch.nn.functional.pad(held, (0, missing)) if missing else held

    def _known_positions(self) -> Tensor:
        return torch.arange(self.length, device=self.device)[None] if self.positions is None else self.positions

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} tokens: the cache holds {self.length}.")
        dropped = self.length - length
        if dropped == 0:
            return
        for store in self.layers:
            store.crop(length, dropped)
        self.positions = None if self.positions is None else self.positions[:, :length]
        self.real = None if self.real is None else self.real[:, :length]
        self.length, self.new = length, 0
        if self.counter is not None:
            self.counter.fill_(length)

    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        """Row i becomes a copy of the present row rows[i]: a beam follows its parent."""
        for store in self.layers:
            store.reorder(rows)
        self.cross = [kv and (kv[0].index_select(0, rows), kv[1].index_select(0, rows)) for kv in self.cross]
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions.index_select(0, rows)
        if self.real is not None and self.real.shape[0] > 1:
            self.real = self.real.index_select(0, rows)

    def n_bytes(self) -> int:
        """Bytes held in keys and values, cross-attention's included."""
        cross = sum(t.numel() * t.element_size() for kv in self.cross if kv for t in kv)
        return cross + sum(store.n_bytes() for store in self.layers)


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
    """A cache for layers with these windows (None: unlimited)."""
    if kind == "static" and capacity is None:
        raise ValueError("a static cache is made to measure: give capacity, the most tokens it will hold.")
    if kind == "windowed" and all(w is None for w in windows):
        raise ValueError("a windowed cache would forget what this model still attends to: no layer has a window.")
    if kind not in ("growing", "static", "windowed"):
        raise ValueError(f"cache kind {kind!r} is not known. Use 'growing', 'static' or 'windowed'.")
    cache = Cache(device, capacity if kind == "static" else None, fixed and kind == "static")
    for width in windows:
        if kind == "static":
            assert capacity is not None
            cache.layers.append(Static(cache, capacity, fixed))
        else:
            cache.layers.append(Windowed(width, slack) if kind == "windowed" and width else Growing())
    cache.cross = [None] * n_cross
    return cache
