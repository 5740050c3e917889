"""The three models. They compute logits, nothing else: loss, sampling and optimizers live elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.cache import Cache, CacheKind, build_cache
from glassformer.model.feedforward import ACTIVATIONS
from glassformer.model.inputs import Mask, check_inputs
from glassformer.model.norm import build_norm
from glassformer.model.stack import Stack
from glassformer.model.tap import NO_TAP, Tap, scoped
from glassformer.shapes import Bool, Float, Int


class Embed(nn.Module):
    """scale * tokens[id] (+ segments[s])."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.scale = cfg.embedding.scale
        width, n_segments = cfg.embedding_width, cfg.embedding.n_segments
        self.tokens = nn.Embedding(cfg.vocab_size, width)
        self.segments = nn.Embedding(n_segments, width) if n_segments else None

    def forward(
        self, tokens: Int[Tensor, "B T"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T W"]:
        x = self.tokens(tokens)
        if self.scale != 1:
            x = x * self.scale
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        return x


class Head(nn.Module):
    """From the residual stream to logits. A tied head has no matrix of its own: it uses the token embedding."""

    def __init__(self, cfg: c.ModelConfig, spec: c.Head):
        super().__init__()
        self.scale, self.softcap = spec.scale, spec.softcap
        width = cfg.head_width
        self.activation = ACTIVATIONS[spec.transform] if spec.transform else None
        self.transform = nn.Linear(cfg.d_model, width, bias=spec.transform_bias) if spec.has_transform else None
        self.norm = build_norm(width, cfg.norm) if spec.transform else None
        self.weight = None if spec.tied else nn.Parameter(torch.empty(cfg.vocab_size, width))
        self.bias = nn.Parameter(torch.empty(cfg.vocab_size)) if spec.bias else None

    def forward(self, x: Float[Tensor, "B T D"], table: Float[Tensor, "V W"]) -> Float[Tensor, "B T V"]:
        x = x if self.transform is None else self.transform(x)
        if self.activation is not None and self.norm is not None:
            x = self.norm(self.activation(x))
        if self.scale != 1:
            x = x * self.scale
        logits = F.linear(x, table if self.weight is None else self.weight, self.bias)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


class _Model(nn.Module):
    """What the three models share: a config, an embedding, a head."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.config = cfg
        self.embed = Embed(cfg)

    def logits(self, hidden: Float[Tensor, "B T D"], tap: Tap = NO_TAP) -> Float[Tensor, "B T V"]:
        """The head alone, on the output of `encode` (for an encoder-decoder: of `decode_hidden`)."""
        head: Any = self.head
        if head is None:
            raise ValueError("this model has no head (config.head is None): use encode() for its hidden states.")
        return tap("logits", head(hidden, self.embed.tokens.weight))

    @property
    def device(self) -> torch.device:
        return self.embed.tokens.weight.device


class DecoderLM(_Model):
    """Decoder-only: logits (B,T,V) of the next token at every position, from that position and earlier ones."""

    def __init__(self, cfg: c.DecoderConfig):
        super().__init__(cfg)
        self.decoder = Stack(cfg, cfg.n_layers, causal=True)
        self.head = Head(cfg, cfg.head) if cfg.head else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.layers

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """`mask` is (B,T), True at real tokens, or (B,T,S), the pattern. With a cache, pass only the new tokens."""
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
        """Hidden states (B,T,D) after the final norm: the input of the head."""
        check_inputs(self.embed, self.decoder, tokens, mask, positions, segments, cache)
        return self.decoder(self.embed(tokens, segments), mask, positions, cache, tap)

    def new_cache(
        self, kind: CacheKind = "growing", capacity: int | None = None, slack: int = 0, fixed: bool = False
    ) -> Cache:
        """An empty cache: `growing`, `static` (needs capacity) or `windowed` (crop can go back `slack` tokens)."""
        return build_cache(self.decoder.windows, kind, self.device, capacity, slack, fixed)


class EncoderLM(_Model):
    """Encoder-only: no causal mask. Logits (B,T,V) are of the token at each position itself (masked LM)."""

    def __init__(self, cfg: c.EncoderConfig):
        super().__init__(cfg)
        self.encoder = Stack(cfg, cfg.n_layers, causal=False)
        self.head = Head(cfg, cfg.head) if cfg.head else None
        self.pooler = nn.Linear(cfg.d_model, cfg.d_model) if cfg.pooler else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.layers

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
        check_inputs(self.embed, self.encoder, tokens, mask, positions, segments)
        return self.encoder(self.embed(tokens, segments), mask, positions, None, tap)

    def pool(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        """tanh(W h_0 + b): BERT's sentence vector, computed from the first token."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: build it with pooler=True.")
        return torch.tanh(self.pooler(hidden[:, 0]))


class Seq2Seq(_Model):
    """Encoder-decoder: the decoder attends to the encoder's output by cross-attention."""

    def __init__(self, cfg: c.Seq2SeqConfig):
        super().__init__(cfg)
        self.encoder = Stack(cfg, cfg.n_encoder_layers, causal=False)
        self.decoder = Stack(cfg, cfg.n_layers, causal=True, cross=True)
        self.head = Head(cfg, cfg.head) if cfg.head else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.layers

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
        check_inputs(self.embed, self.encoder, source, mask, positions)
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
        """The decoder alone. `memory` is the output of `encode`; None if its keys and values are in the cache."""
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
        """Hidden states (B,T,D) after the final norm: the input of the head."""
        check_inputs(self.embed, self.decoder, target, mask, positions, None, cache)
        if memory is None and (cache is None or cache.length == 0):
            raise ValueError("the decoder has no encoder output: pass `memory`, or a cache that holds its keys.")
        if memory_mask is not None and memory_mask.device.type == "cpu" and not bool(memory_mask.any(1).all()):
            raise ValueError("a source sequence is all padding, so cross-attention has no keys: drop that sequence.")
        x = self.embed(target)
        return self.decoder(x, mask, positions, cache, scoped(tap, "decoder."), memory, memory_mask)

    def new_cache(
        self, kind: CacheKind = "growing", capacity: int | None = None, slack: int = 0, fixed: bool = False
    ) -> Cache:
        """An empty cache of the decoder; the encoder's keys and values join it at the first step."""
        windows = self.decoder.windows
        return build_cache(windows, kind, self.device, capacity, slack, fixed, n_cross=len(windows))


Model = DecoderLM | EncoderLM | Seq2Seq
