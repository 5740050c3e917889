"""A block, attention and feed-forward on a residual stream, and the stack of blocks of an encoder or a decoder.

Placements of the norms differ in one forward each. Encoder and decoder differ only in `causal` and `cross`.
"""

from typing import assert_never

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.attention import Attention
from glassformer.model.cache import Cache
from glassformer.model.context import (
    NO_TAP,
    AttentionContext,
    ForwardContext,
    LayerPositions,
    Mask,
    Tap,
    forward_context,
    scoped,
)
from glassformer.model.latent import LatentAttention
from glassformer.model.layers import Dense, Gated, Unchanged, build_dense, build_norm
from glassformer.model.moe import MoE
from glassformer.model.positions import NoPosition, T5Bias, build_position
from glassformer.shapes import Bool, Float, Int


class Block(nn.Module):
    """The parts of a block. Decoder, encoder and encoder-decoder use the same ones.

    A block does not know its layer, because several layers may share it: `forward` receives the layer's index.
    """

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__()
        self.placement, self.residual_scale = cfg.placement, cfg.residual_scale
        self.attention = _build_attention(cfg)
        self.cross = _build_attention(cfg) if cross else None
        self.feedforward = _build_feedforward(cfg.d_model, cfg.layer_feedforward(layer))
        self.dropout = nn.Dropout(cfg.dropout)

    def attend(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap
    ) -> Float[Tensor, "B T D"]:
        """Self-attention, with dropout."""
        return self.dropout(self.attention(x, context.layers[layer], scoped(tap, "attention.")))

    def attend_memory(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap
    ) -> Float[Tensor, "B T D"]:
        """Cross-attention over the encoder's output, whose keys and values are computed once and cached."""
        assert self.cross is not None
        kv = None if context.cache is None else context.cache.cross[layer]
        if kv is None:
            assert context.memory is not None
            kv = self.cross.project_kv(context.memory)
            if context.cache is not None:
                context.cache.cross[layer] = kv
        return self.dropout(self.cross(x, AttentionContext(context.memory_mask), scoped(tap, "cross."), kv))

    def feed(self, x: Float[Tensor, "B T D"], tap: Tap) -> Float[Tensor, "B T D"]:
        """Feed-forward, with dropout."""
        assert self.feedforward is not None
        tap = scoped(tap, "feedforward.")
        return self.dropout(tap("out", self.feedforward(x, tap)))

    def add(self, x: Float[Tensor, "B T D"], branch: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Add the output of a branch to the residual stream, times the residual scale."""
        return torch.add(x, branch, alpha=self.residual_scale)


class SequentialBlock(Block):
    """A block whose sublayers follow each other, each with a norm of its own."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__(cfg, layer, cross)
        has_norm = cfg.has_attention_norm(layer)
        self.norm_attention = build_norm(cfg.d_model, cfg.norm) if has_norm else Unchanged()
        self.norm_cross = build_norm(cfg.d_model, cfg.norm) if cross else None
        self.norm_feedforward = build_norm(cfg.d_model, cfg.norm) if self.feedforward is not None else None


class PreNormBlock(SequentialBlock):
    """x + sublayer(norm(x)), for attention, cross-attention and feed-forward in turn."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        # one expression: a name for a part of it would keep that tensor alive during the feed-forward
        x = self.add(
            x,
            self.dropout(
                self.attention(
                    tap("attention.normed", self.norm_attention(x)),
                    context.layers[layer],
                    scoped(tap, "attention."),
                )
            ),
        )
        if self.norm_cross is not None:
            x = self.add(x, self.attend_memory(tap("cross.normed", self.norm_cross(x)), context, layer, tap))
        x = tap("resid_mid", x)
        if self.norm_feedforward is not None:
            x = self.add(x, self.feed(tap("feedforward.normed", self.norm_feedforward(x)), tap))
        return tap("resid_post", x)


class PostNormBlock(SequentialBlock):
    """norm(x + sublayer(x)), for attention, cross-attention and feed-forward in turn."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        x = self.norm_attention(self.add(x, self.attend(x, context, layer, tap)))
        if self.norm_cross is not None:
            x = self.norm_cross(self.add(x, self.attend_memory(x, context, layer, tap)))
        x = tap("resid_mid", x)
        if self.norm_feedforward is not None:
            x = self.norm_feedforward(self.add(x, self.feed(x, tap)))
        return tap("resid_post", x)


class AfterNormBlock(SequentialBlock):
    """x + norm(sublayer(x)), for attention, cross-attention and feed-forward in turn."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        x = self.add(x, tap("attention.out_normed", self.norm_attention(self.attend(x, context, layer, tap))))
        if self.norm_cross is not None:
            x = self.add(x, tap("cross.out_normed", self.norm_cross(self.attend_memory(x, context, layer, tap))))
        x = tap("resid_mid", x)
        if self.norm_feedforward is not None:
            x = self.add(x, tap("feedforward.out_normed", self.norm_feedforward(self.feed(x, tap))))
        return tap("resid_post", x)


class SandwichBlock(SequentialBlock):
    """x + norm_out(sublayer(norm(x))), for attention, cross-attention and feed-forward in turn."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__(cfg, layer, cross)
        self.norm_attention_out = build_norm(cfg.d_model, cfg.norm)
        self.norm_cross_out = build_norm(cfg.d_model, cfg.norm) if cross else None
        self.norm_feedforward_out = build_norm(cfg.d_model, cfg.norm) if self.feedforward is not None else None

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        # one expression each: a name for the output of a sublayer would keep it alive during the next one
        x = self.add(
            x,
            tap(
                "attention.out_normed",
                self.norm_attention_out(
                    self.attend(tap("attention.normed", self.norm_attention(x)), context, layer, tap)
                ),
            ),
        )
        if self.norm_cross is not None and self.norm_cross_out is not None:
            out = self.attend_memory(tap("cross.normed", self.norm_cross(x)), context, layer, tap)
            x = self.add(x, tap("cross.out_normed", self.norm_cross_out(out)))
            del out
        x = tap("resid_mid", x)
        if self.norm_feedforward is not None and self.norm_feedforward_out is not None:
            out = self.feed(tap("feedforward.normed", self.norm_feedforward(x)), tap)
            x = self.add(x, tap("feedforward.out_normed", self.norm_feedforward_out(out)))
        return tap("resid_post", x)


class ParallelBlock(Block):
    """x + attention(norm(x)) + feedforward(norm(x)), with one norm for both."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__(cfg, layer, cross)
        self.norm = build_norm(cfg.d_model, cfg.norm)

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        normed = tap("attention.normed", self.norm(x))
        return tap(
            "resid_post", self.add(self.add(x, self.attend(normed, context, layer, tap)), self.feed(normed, tap))
        )


class ParallelTwoBlock(SequentialBlock):
    """x + attention(norm_attention(x)) + feedforward(norm_feedforward(x))."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        assert self.norm_feedforward is not None
        attended = self.attend(tap("attention.normed", self.norm_attention(x)), context, layer, tap)
        fed = self.feed(tap("feedforward.normed", self.norm_feedforward(x)), tap)
        return tap("resid_post", self.add(self.add(x, attended), fed))


def build_block(cfg: c.ModelConfig, layer: int, cross: bool = False) -> Block:
    """Build the block of one layer, with the config's placement of norms."""
    match cfg.placement:
        case "pre":
            return PreNormBlock(cfg, layer, cross)
        case "post":
            return PostNormBlock(cfg, layer, cross)
        case "parallel":
            return ParallelBlock(cfg, layer, cross)
        case "parallel_two":
            return ParallelTwoBlock(cfg, layer, cross)
        case "sandwich":
            return SandwichBlock(cfg, layer, cross)
        case "after":
            return AfterNormBlock(cfg, layer, cross)
        case _:
            assert_never(cfg.placement)


def _build_attention(cfg: c.ModelConfig) -> Attention:
    latent = cfg.attention.latent
    return Attention(cfg) if latent is None else LatentAttention(cfg, latent)


def _build_feedforward(d_model: int, spec: c.FeedForward) -> Dense | Gated | MoE | None:
    match spec:
        case c.NoFeedForward():
            return None
        case c.MoE():
            return MoE(d_model, spec)
        case _:
            return build_dense(d_model, spec)


class Stack(nn.Module):
    """Positions, embedding norm, projection to D, blocks, final norm."""

    def __init__(self, cfg: c.ModelConfig, n_layers: int, causal: bool, cross: bool = False):
        super().__init__()
        self.causal = causal
        self.max_position = cfg.max_len if cfg.learned_positions is not None else None
        self.changes_frequencies_at = cfg.changes_frequencies_at
        self.windows = [cfg.window(layer) for layer in range(n_layers)]
        self.position = build_position(cfg.position, cfg, causal)
        self.kinds = layer_positions(cfg, n_layers, causal)
        self.score_bias = T5Bias(cfg.score_bias, cfg.n_heads, causal) if cfg.score_bias else None
        self.embed_norm = build_norm(cfg.position_width, cfg.norm) if cfg.embedding.norm else None
        self.projects_first = cfg.embedding.project == "before_positions"
        self.project = (
            nn.Linear(cfg.embedding_width, cfg.d_model, bias=cfg.embedding.project_bias)
            if cfg.embedding.width
            else None
        )
        self.dropout = nn.Dropout(cfg.dropout)
        self.block_of_layer = [cfg.block_of_layer(layer) for layer in range(n_layers)]
        first_layers = [self.block_of_layer.index(block) for block in range(max(self.block_of_layer) + 1)]
        self.blocks = nn.ModuleList(build_block(cfg, layer, cross) for layer in first_layers)
        self.norm = build_norm(cfg.d_model, cfg.norm) if cfg.placement != "post" else None

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
        memory: Float[Tensor, "B N D"] | None = None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        context = forward_context(
            *(x, self.position, self.windows, self.causal, mask, positions, cache, memory, memory_mask),
            self.kinds,
            self.score_bias,
        )
        x = tap("embed", self.dropout(self.add_positions(x, context.positions)))
        for layer, block in enumerate(self.layers):
            x = block(x, context, layer, scoped(tap, f"blocks.{layer}."))
        return tap("final", x if self.norm is None else self.norm(x))

    @property
    def layers(self) -> nn.ModuleList:
        """The block of each layer. A block that several layers share is in the list several times."""
        if len(self.blocks) == len(self.block_of_layer):
            return self.blocks
        return nn.ModuleList(self.blocks[block] for block in self.block_of_layer)

    def add_positions(self, x: Float[Tensor, "B T W"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        """Add positions to the token embedding, apply its norm, and project it to D if it has another width."""
        if self.project is not None and self.projects_first:
            x = self.project(x)
        x = self.position.add(x, positions)
        x = x if self.embed_norm is None else self.embed_norm(x)
        return x if self.project is None or self.projects_first else self.project(x)

    def scheme(self, layer: int) -> NoPosition:
        """Return the position scheme of one layer."""
        which = 0 if self.kinds is None else self.kinds.index[layer]
        return self.position if not which or self.kinds is None else self.kinds.others[which - 1]


def layer_positions(cfg: c.ModelConfig, n_layers: int, causal: bool) -> LayerPositions | None:
    """Build the position schemes of layers that differ from the model's; None if all layers are alike."""
    specs = list(dict.fromkeys([cfg.position, *(cfg.layer_position(layer) for layer in range(n_layers))]))
    if len(specs) == 1:
        return None
    index = [specs.index(cfg.layer_position(layer)) for layer in range(n_layers)]
    return LayerPositions([build_position(spec, cfg, causal) for spec in specs[1:]], index)
