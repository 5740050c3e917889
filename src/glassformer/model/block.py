"""A block, attention and feed-forward on a residual stream, and the stack of blocks of an encoder or a decoder.

Placements of the norms differ in one forward each. Encoder and decoder differ only in `causal` and `cross`.
"""

from typing import assert_never

from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.attention import Attention
from glassformer.model.cache import Cache
from glassformer.model.context import NO_TAP, AttentionContext, ForwardContext, Tap, forward_context, scoped
from glassformer.model.layers import Dense, Gated, MoE, build_dense, build_norm
from glassformer.model.positions import build_position
from glassformer.shapes import Bool, Float, Int


class Block(nn.Module):
    """The parts of a block. Decoder, encoder and encoder-decoder use the same ones."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__()
        self.layer, self.placement = layer, cfg.placement
        self.attention = Attention(cfg)
        self.cross = Attention(cfg) if cross else None
        self.feedforward = _build_feedforward(cfg.d_model, cfg.feedforward)
        self.dropout = nn.Dropout(cfg.dropout)

    def attend(self, x: Float[Tensor, "B T D"], context: ForwardContext, tap: Tap) -> Float[Tensor, "B T D"]:
        """Self-attention, with dropout."""
        return self.dropout(self.attention(x, context.layers[self.layer], scoped(tap, "attention.")))

    def attend_memory(self, x: Float[Tensor, "B T D"], context: ForwardContext, tap: Tap) -> Float[Tensor, "B T D"]:
        """Cross-attention over the encoder's output, whose keys and values are computed once and cached."""
        assert self.cross is not None
        kv = None if context.cache is None else context.cache.cross[self.layer]
        if kv is None:
            assert context.memory is not None
            kv = self.cross.project_kv(context.memory)
            if context.cache is not None:
                context.cache.cross[self.layer] = kv
        return self.dropout(self.cross(x, AttentionContext(context.memory_mask), scoped(tap, "cross."), kv))

    def feed(self, x: Float[Tensor, "B T D"], tap: Tap) -> Float[Tensor, "B T D"]:
        """Feed-forward, with dropout."""
        assert self.feedforward is not None
        tap = scoped(tap, "feedforward.")
        return self.dropout(tap("out", self.feedforward(x, tap)))


class SequentialBlock(Block):
    """A block whose sublayers follow each other, each with a norm of its own."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__(cfg, layer, cross)
        self.norm_attention = build_norm(cfg.d_model, cfg.norm)
        self.norm_cross = build_norm(cfg.d_model, cfg.norm) if cross else None
        self.norm_feedforward = build_norm(cfg.d_model, cfg.norm) if self.feedforward is not None else None


class PreNormBlock(SequentialBlock):
    """x + sublayer(norm(x)), for attention, cross-attention and feed-forward in turn."""

    def forward(self, x: Float[Tensor, "B T D"], context: ForwardContext, tap: Tap = NO_TAP) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        # one expression: a name for a part of it would keep that tensor alive during the feed-forward
        x = x + self.dropout(
            self.attention(
                tap("attention.normed", self.norm_attention(x)), context.layers[self.layer], scoped(tap, "attention.")
            )
        )
        if self.norm_cross is not None:
            x = x + self.attend_memory(tap("cross.normed", self.norm_cross(x)), context, tap)
        x = tap("resid_mid", x)
        if self.norm_feedforward is not None:
            x = x + self.feed(tap("feedforward.normed", self.norm_feedforward(x)), tap)
        return tap("resid_post", x)


class PostNormBlock(SequentialBlock):
    """norm(x + sublayer(x)), for attention, cross-attention and feed-forward in turn."""

    def forward(self, x: Float[Tensor, "B T D"], context: ForwardContext, tap: Tap = NO_TAP) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        x = self.norm_attention(x + self.attend(x, context, tap))
        if self.norm_cross is not None:
            x = self.norm_cross(x + self.attend_memory(x, context, tap))
        x = tap("resid_mid", x)
        if self.norm_feedforward is not None:
            x = self.norm_feedforward(x + self.feed(x, tap))
        return tap("resid_post", x)


class ParallelBlock(Block):
    """x + attention(norm(x)) + feedforward(norm(x)), with one norm for both."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__(cfg, layer, cross)
        self.norm = build_norm(cfg.d_model, cfg.norm)

    def forward(self, x: Float[Tensor, "B T D"], context: ForwardContext, tap: Tap = NO_TAP) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        normed = tap("attention.normed", self.norm(x))
        return tap("resid_post", x + self.attend(normed, context, tap) + self.feed(normed, tap))


def build_block(cfg: c.ModelConfig, layer: int, cross: bool = False) -> Block:
    """Build the block of one layer, with the config's placement of norms."""
    match cfg.placement:
        case "pre":
            return PreNormBlock(cfg, layer, cross)
        case "post":
            return PostNormBlock(cfg, layer, cross)
        case "parallel":
            return ParallelBlock(cfg, layer, cross)
        case _:
            assert_never(cfg.placement)


def _build_feedforward(d_model: int, spec: c.FeedForward) -> Dense | Gated | MoE | None:
    match spec:
        case c.NoFeedForward():
            return None
        case c.MoE():
            return MoE(d_model, spec)
        case _:
            return build_dense(d_model, spec)


class Stack(nn.Module):
    """Positions, embedding norm, blocks, final norm."""

    def __init__(self, cfg: c.ModelConfig, n_layers: int, causal: bool, cross: bool = False):
        super().__init__()
        self.causal = causal
        self.max_position = cfg.max_len if cfg.learned_positions is not None else None
        self.windows = [cfg.window(layer) for layer in range(n_layers)]
        self.position = build_position(cfg, causal)
        self.embed_norm = build_norm(cfg.d_model, cfg.norm) if cfg.embedding.norm else None
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(build_block(cfg, layer, cross) for layer in range(n_layers))
        self.norm = build_norm(cfg.d_model, cfg.norm) if cfg.placement != "post" else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
        memory: Float[Tensor, "B N D"] | None = None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        context = forward_context(
            x, self.position, self.windows, self.causal, mask, positions, cache, memory, memory_mask
        )
        x = self.position.add(x, context.positions)
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = tap("embed", self.dropout(x))
        for layer, block in enumerate(self.blocks):
            x = block(x, context, scoped(tap, f"blocks.{layer}."))
        return tap("final", x if self.norm is None else self.norm(x))
