"""A stack of blocks: what an encoder and a decoder have in common. Only `causal` and `cross` tell them apart."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.block import Block, Surroundings
from glassformer.model.cache import Cache
from glassformer.model.masks import View, padding, self_view
from glassformer.model.norm import build_norm
from glassformer.model.positions import build_position
from glassformer.model.tap import Tap, scoped
from glassformer.shapes import Bool, Float, Int


class Stack(nn.Module):
    """positions, embedding norm, blocks, final norm."""

    def __init__(self, cfg: c.ModelConfig, n_layers: int, causal: bool, cross: bool = False):
        super().__init__()
        self.causal, self.dropout = causal, cfg.dropout
        self.max_position = cfg.max_len if cfg.learned_positions is not None else None
        self.windows = [cfg.window(layer) for layer in range(n_layers)]
        self.position = build_position(cfg, causal)
        self.embed_norm = build_norm(cfg.d_model, cfg.norm) if cfg.embedding.norm else None
        self.blocks = nn.ModuleList(Block(cfg, layer, cross) for layer in range(n_layers))
        self.norm = build_norm(cfg.d_model, cfg.norm) if cfg.placement != "post" else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None,
        positions: Int[Tensor, "#B T"] | None,
        cache: Cache | None,
        tap: Tap,
        memory: Float[Tensor, "B N D"] | None = None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        real = mask if mask is not None and mask.dim() == 2 else None
        pattern = mask if mask is not None and mask.dim() == 3 else None
        # without a cache to go on from, one that lives for this call only does the counting
        counting = cache if cache is not None else Cache(x.device)
        queries = self._place(counting, x.shape[1], positions, real)
        x = self.position.add(x, queries)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        exact = x.dtype  # what positions are computed in, whatever a tap makes of the stream
        x = tap("embed", F.dropout(x, self.dropout, self.training))
        around = Surroundings(
            views=self._views(counting, pattern),
            infusion=self.position.infusion(queries, x.dtype),
            rotation=self.position.rotation(queries, exact, self._last(counting, queries)),
            bias=self.position.bias(queries, counting.key_positions(), exact),
            cache=cache,
            memory=memory,
            memory_view=View(None if memory_mask is None else padding(memory_mask), False),
        )
        for layer, block in enumerate(self.blocks):
            x = block(x, around, scoped(tap, f"block.{layer}."))
        return tap("final", x if self.norm is None else self.norm(x))

    def _place(
        self, cache: Cache, new: int, positions: Int[Tensor, "#B T"] | None, real: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "#B T"]:
        """Positions of the new tokens, noted in the cache: given, or counting real tokens on from what is there."""
        given = positions
        if positions is None and real is not None:
            given = positions = (cache.next_position() + real.long().cumsum(1) - 1).clamp(min=0)
        elif positions is None:
            positions = cache.default_positions(new)
        self._check_positions(positions, cache, new, explicit=given is not None)
        cache.append(new, given, real)
        return positions

    def _last(self, cache: Cache, queries: Tensor) -> int | None:
        """The largest position, where that is known without waiting for a device."""
        if cache.positions is None:
            # a captured step is replayed at later positions: the table must reach to the end of the buffer
            return cache.capacity - 1 if cache.fixed and cache.capacity else cache.length - 1
        if queries.device.type != "cpu" or torch.compiler.is_compiling() or int(queries.min()) < 0:
            return None
        return int(queries.max())

    def _check_positions(self, positions: Tensor, cache: Cache, new: int, explicit: bool) -> None:
        if self.max_position is None or torch.compiler.is_compiling():
            return
        if explicit or cache.positions is not None:
            last, first = (int(positions.max()), int(positions.min())) if positions.numel() else (0, 0)
        else:
            last, first = cache.length + new - 1, 0
        if first < 0 or last >= self.max_position:
            raise ValueError(
                f"position {first if first < 0 else last} has no row in a learned table of {self.max_position} "
                f"positions (0 to {self.max_position - 1}): shorten the sequence, or use a model with a longer context."
            )

    def _views(self, cache: Cache, pattern: Bool[Tensor, "B T S"] | None) -> list[View]:
        queries, keys = cache.query_index(), cache.key_index()
        if pattern is not None:
            if pattern.shape[1:] != (len(queries), len(keys)):
                raise ValueError(
                    f"mask of shape {tuple(pattern.shape)} does not fit {len(queries)} queries over {len(keys)} keys: "
                    "a whole pattern is (batch, new tokens, cached and new tokens)."
                )
            itself = keys[None, :] == queries[:, None]
            pattern = pattern | (itself & ~pattern.any(-1, keepdim=True))  # no empty row
            return [View(pattern[:, None], False)] * len(self.windows)
        real = cache.key_real()
        made = {w: self_view(queries, keys, real, self.causal, w, cache.fixed) for w in set(self.windows)}
        return [made[w] for w in self.windows]
