"""The three models. They compute logits, nothing else: loss, sampling and optimisers live elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.cache import Cache, CacheKind, build_cache
from glassformer.model.feedforward import ACTIVATIONS
from glassformer.model.norm import build_norm
from glassformer.model.stack import Stack
from glassformer.model.tap import NO_TAP, Tap, scoped
from glassformer.shapes import Bool, Float, Int

Mask = Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None


class Embed(nn.Module):
    """scale * tokens[id] (+ segments[s])."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.scale = cfg.embedding.scale
        self.tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.segments = nn.Embedding(cfg.embedding.n_segments, cfg.d_model) if cfg.embedding.n_segments else None

    def forward(
        self, tokens: Int[Tensor, "B T"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        _check_ids(tokens, self.tokens.num_embeddings, "token", "vocabulary")
        x = self.tokens(tokens)
        if self.scale != 1:
            x = x * self.scale
        if self.segments is None:
            if segments is not None:
                raise ValueError("segments were given to a model without segment embeddings: leave them out.")
            return x
        segments = torch.zeros_like(tokens) if segments is None else segments
        _check_ids(segments, self.segments.num_embeddings, "segment", "segments")
        return x + self.segments(segments)


class Head(nn.Module):
    """From the stream to logits. A tied head owns no matrix: it is handed the token table, the same Parameter."""

    def __init__(self, cfg: c.ModelConfig, spec: c.Head):
        super().__init__()
        self.scale = spec.scale
        self.activation = ACTIVATIONS[spec.transform] if spec.transform else None
        self.transform = nn.Linear(cfg.d_model, cfg.d_model) if spec.transform else None
        self.norm = build_norm(cfg.d_model, cfg.norm) if spec.transform else None
        self.weight = None if spec.tied else nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_model))
        self.bias = nn.Parameter(torch.empty(cfg.vocab_size)) if spec.bias else None

    def forward(self, x: Float[Tensor, "B T D"], table: Float[Tensor, "V D"]) -> Float[Tensor, "B T V"]:
        if self.transform is not None and self.activation is not None and self.norm is not None:
            x = self.norm(self.activation(self.transform(x)))
        if self.scale != 1:
            x = x * self.scale
        return F.linear(x, table if self.weight is None else self.weight, self.bias)


class _Model(nn.Module):
    """What the three share: a config, an embedding, a head."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.config = cfg
        self.embed = Embed(cfg)

    def logits(self, hidden: Float[Tensor, "B T D"], tap: Tap = NO_TAP) -> Float[Tensor, "B T V"]:
        """The head alone, over what `encode` (an encoder-decoder: `decode_hidden`) gave."""
        head: Any = self.head
        if head is None:
            raise ValueError("this model has no head (config.head is None): use encode() for its hidden states.")
        return tap("logits", head(hidden, self.embed.tokens.weight))

    @property
    def device(self) -> torch.device:
        return self.embed.tokens.weight.device


class DecoderLM(_Model):
    """Decoder-only: logits (B,T,V) of the next token at every place, from that place and those before it."""

    def __init__(self, cfg: c.DecoderConfig):
        super().__init__(cfg)
        self.decoder = Stack(cfg, cfg.n_layers, causal=True)
        self.head = Head(cfg, cfg.head) if cfg.head else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.blocks

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """`mask` is (B,T), real tokens, or (B,T,S), the whole pattern. With a cache, give the new tokens only."""
        return self.logits(self.encode(tokens, mask, positions, segments, cache, tap), tap)

    def encode(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        """What the head reads."""
        _check_input(tokens, mask)
        return self.decoder(self.embed(tokens, segments), mask, positions, cache, tap)

    def new_cache(
        self, kind: CacheKind = "growing", capacity: int | None = None, slack: int = 0, fixed: bool = False
    ) -> Cache:
        """An empty cache: `growing`, `static` (needs capacity) or `windowed` (crop can go back `slack` tokens)."""
        return build_cache(self.decoder.windows, kind, self.device, capacity, slack, fixed)


class EncoderLM(_Model):
    """Encoder-only: the decoder without its causal mask. Logits are of the token at each place itself (masked LM)."""

    def __init__(self, cfg: c.EncoderConfig):
        super().__init__(cfg)
        self.encoder = Stack(cfg, cfg.n_layers, causal=False)
        self.head = Head(cfg, cfg.head) if cfg.head else None
        self.pooler = nn.Linear(cfg.d_model, cfg.d_model) if cfg.pooler else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.blocks

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        return self.logits(self.encode(tokens, mask, positions, segments, tap), tap)

    def encode(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        _check_input(tokens, mask)
        return self.encoder(self.embed(tokens, segments), mask, positions, None, tap)

    def pool(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        """tanh(W h_0 + b): BERT's sentence vector, read off the first token."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: build it with pooler=True.")
        return torch.tanh(self.pooler(hidden[:, 0]))


class Seq2Seq(_Model):
    """Encoder-decoder: the decoder reads the encoder's output through cross-attention."""

    def __init__(self, cfg: c.Seq2SeqConfig):
        super().__init__(cfg)
        self.encoder = Stack(cfg, cfg.n_encoder_layers, causal=False)
        self.decoder = Stack(cfg, cfg.n_layers, causal=True, cross=True)
        self.head = Head(cfg, cfg.head) if cfg.head else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.blocks

    def forward(
        self,
        source: Int[Tensor, "B N"],
        target: Int[Tensor, "B T"],
        source_mask: Bool[Tensor, "B N"] | None = None,
        mask: Mask = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each target token. With a cache, the source is encoded at the first call only."""
        memory = None if cache is not None and cache.length else self.encode(source, source_mask, tap=tap)
        return self.decode(target, memory, source_mask, mask, cache=cache, tap=tap)

    def encode(
        self,
        source: Int[Tensor, "B N"],
        mask: Mask = None,
        positions: Int[Tensor, "#B N"] | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B N D"]:
        _check_input(source, mask)
        return self.encoder(self.embed(source), mask, positions, None, scoped(tap, "encoder."))

    def decode(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B N D"] | None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """The decoder alone, over an encoder output computed before; None when the cache already holds its keys."""
        return self.logits(self.decode_hidden(target, memory, memory_mask, mask, positions, cache, tap), tap)

    def decode_hidden(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B N D"] | None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        """What the head reads."""
        _check_input(target, mask)
        if memory is None and (cache is None or cache.length == 0):
            raise ValueError("the decoder has nothing to read: give the encoder's output, or a cache that has seen it.")
        if memory_mask is not None and memory_mask.device.type == "cpu" and not bool(memory_mask.any(1).all()):
            raise ValueError("a source row is all padding: cross-attention has nothing to read there. Drop the row.")
        x = self.embed(target)
        return self.decoder(x, mask, positions, cache, scoped(tap, "decoder."), memory, memory_mask)

    def new_cache(
        self, kind: CacheKind = "growing", capacity: int | None = None, slack: int = 0, fixed: bool = False
    ) -> Cache:
        """An empty cache of the decoder; the encoder's keys and values join it at the first step."""
        windows = self.decoder.windows
        return build_cache(windows, kind, self.device, capacity, slack, fixed, n_cross=len(windows))


Model = DecoderLM | EncoderLM | Seq2Seq


def _check_input(tokens: Tensor, mask: Tensor | None) -> None:
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] == 0:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: a batch is (rows, length), neither of them empty.")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}: it must be boolean, True = real token (use mask.bool()).")
    if mask.dim() == 2 and mask.shape != tokens.shape:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(tokens.shape)}: "
            "it marks which of the new tokens are real."
        )


def _check_ids(ids: Tensor, size: int, what: str, where: str) -> None:
    """On the CPU only: elsewhere looking at the ids would wait for the device, and the device itself complains."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"{what} id {bad} is outside the {where} of {size} (0 to {size - 1}).")
