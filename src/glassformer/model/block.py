"""One block: attention and feed-forward on a residual stream. Placements of the norms differ in one forward each."""

from typing import assert_never

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.attention import Attention
from glassformer.model.context import AttentionContext, ForwardContext
from glassformer.model.feedforward import Dense, Gated, build_dense
from glassformer.model.moe import MoE
from glassformer.model.norm import Unchanged, build_norm
from glassformer.model.tap import NO_TAP, Tap, scoped
from glassformer.shapes import Float


class Block(nn.Module):
    """The parts of a block. Decoder, encoder and encoder-decoder use the same ones.

    A block does not know its layer, because several layers may share it: `forward` receives the layer's index.
    """

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__()
        self.placement, self.residual_scale = cfg.placement, cfg.residual_scale
        self.attention = Attention(cfg)
        self.cross = Attention(cfg) if cross else None
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
        out = self.attend(tap("attention.normed", self.norm_attention(x)), context, layer, tap)
        x = self.add(x, tap("attention.out_normed", self.norm_attention_out(out)))
        if self.norm_cross is not None and self.norm_cross_out is not None:
            out = self.attend_memory(tap("cross.normed", self.norm_cross(x)), context, layer, tap)
            x = self.add(x, tap("cross.out_normed", self.norm_cross_out(out)))
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


def _build_feedforward(d_model: int, spec: c.FeedForward) -> Dense | Gated | MoE | None:
    match spec:
        case c.NoFeedForward():
            return None
        case c.MoE():
            return MoE(d_model, spec)
        case _:
            return build_dense(d_model, spec)
