"""The encoder and the encoder-decoder of the base models."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bugs.base import Around, Attention, Block, Cache, Config, Transformer, counted, make_norm


class Encoder(Transformer):
    """`model(idx, attention_mask) -> logits` of the token at each place itself; every token sees every real token."""

    def pattern(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device)

    def forward(self, idx: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        real = self.real_tokens(idx, attention_mask)
        return self.run(idx, real, positions, Cache(len(self.blocks)), None)

    def loss(self, idx: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Masked language modelling: labels of -100 and at padding do not count."""
        if attention_mask is not None:
            labels = labels.masked_fill(~attention_mask.bool(), -100)
        return F.cross_entropy(self(idx, attention_mask).flatten(0, 1), labels.flatten(), ignore_index=-100)


class CrossAttention(Attention):
    """Queries of the target over keys and values of the source; no positions."""

    def forward(self, x: Tensor, around: Around, cache: Cache | None = None) -> Tensor:
        q = self.split(self.q_proj(x), self.cfg.n_heads)
        k, v = self.remembered(around, cache)
        return self.out_proj(self.attend(q, k, v, self.source_allowed(around, x.shape[1]), None))

    def remembered(self, around: Around, cache: Cache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.cross[self.layer] is not None:
            return cache.cross[self.layer]
        k = self.split(self.k_proj(around.memory), self.cfg.n_kv_heads)
        v = self.split(self.v_proj(around.memory), self.cfg.n_kv_heads)
        if cache is not None:
            cache.cross[self.layer] = (k, v)
        return k, v

    def source_allowed(self, around: Around, new: int) -> Tensor:
        return around.memory_allowed.expand(-1, -1, new, -1)


class CrossBlock(Block):
    """Self-attention, cross-attention, MLP; pre-norm or post-norm."""

    def __init__(self, cfg: Config, layer: int):
        super().__init__(cfg, layer)
        self.cross, self.norm_cross = CrossAttention(cfg, layer), make_norm(cfg)

    def forward(self, x: Tensor, around: Around, cache: Cache | None = None) -> Tensor:
        if self.cfg.norm_placement == "post":
            x = self.norm1(x + self.dropout(self.attention(x, around, cache)))
            x = self.norm_cross(x + self.dropout(self.cross(x, around, cache)))
            return self.norm2(x + self.dropout(self.mlp(x)))
        x = x + self.dropout(self.attention(self.norm1(x), around, cache))
        x = x + self.dropout(self.cross(self.norm_cross(x), around, cache))
        return x + self.dropout(self.mlp(self.norm2(x)))


class EncoderDecoder(Transformer):
    """`model(src, tgt, src_mask, tgt_mask, cache)`; with a cache the source is read at the first call only."""

    def make_blocks(self, cfg: Config) -> nn.ModuleList:
        self.encoder_blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))
        self.encoder_norm = nn.Identity() if cfg.norm_placement == "post" else make_norm(cfg)
        return nn.ModuleList(CrossBlock(cfg, layer) for layer in range(cfg.n_layers))

    def new_cache(self) -> Cache:
        return self.cache_class(len(self.blocks))

    def pattern(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys[None, :] <= queries[:, None]

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        real = self.real_tokens(src, src_mask)
        noted = Cache(len(self.encoder_blocks))
        positions = self.count_positions(noted, real)
        index = torch.arange(src.shape[1], device=src.device)
        allowed = real[:, None, None, :] | (index == index[:, None])
        around, x = Around(positions, positions, allowed, real), self.embed(src, positions)
        for block in self.encoder_blocks:
            x = block(x, around)
        return self.encoder_norm(x)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Cache]:
        noted = Cache(len(self.blocks)) if cache is None else cache
        memory = None
        if noted.memory_allowed is None:
            memory = self.encode(src, src_mask)
            noted.memory_allowed = self.real_tokens(src, src_mask)[:, None, None, :]
        logits = self.run(tgt, self.real_tokens(tgt, tgt_mask), None, noted, cache, memory)
        return logits if cache is None else (logits, cache)

    def loss(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None) -> Tensor:
        """Mean over the real target tokens after the first."""
        return self.cross_entropy(self(src, tgt, src_mask, tgt_mask), counted(tgt, tgt_mask))

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    @torch.no_grad()
    def generate(self, src: Tensor, n: int, src_mask: Tensor | None = None, use_cache: bool = True) -> Tensor:
        """The start token and n greedy ones."""
        tgt = torch.full((len(src), 1), self.cfg.start, dtype=torch.long, device=src.device)
        cache = self.new_cache() if use_cache else None
        for _ in range(n):
            if cache is None:
                logits = self(src, tgt, src_mask)
            else:
                logits, cache = self(src, tgt[:, -1:], src_mask, cache=cache)
            tgt = torch.cat([tgt, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return tgt
