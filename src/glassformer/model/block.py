"""One block: attention and feed-forward on a residual stream, wired pre-norm, post-norm or in parallel."""

from dataclasses import dataclass
from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.attention import Attention
from glassformer.model.cache import Cache
from glassformer.model.feedforward import Dense, Gated, build_dense
from glassformer.model.masks import View
from glassformer.model.moe import MoE
from glassformer.model.norm import build_norm
from glassformer.model.positions import Rotation
from glassformer.model.tap import Tap, scoped
from glassformer.shapes import Float


@dataclass
class Surroundings:
    """What the blocks of a stack share in one forward: who sees whom, where tokens stand, what was seen before."""

    views: list[View]
    """One per layer: layers may differ in their window."""
    infusion: Tensor | None = None
    """Position vectors (B, T, D) that queries and keys read beside their input."""
    rotation: Rotation | None = None
    bias: Tensor | None = None
    cache: Cache | None = None
    memory: Tensor | None = None
    """The encoder's output (B, S, D), read by cross-attention; None once its keys are cached."""
    memory_view: View = View(None, False)


class Block(nn.Module):
    """The only block there is: decoder, encoder and encoder-decoder differ in what surrounds it."""

    def __init__(self, cfg: c.ModelConfig, layer: int, cross: bool):
        super().__init__()
        self.layer, self.placement, self.dropout = layer, cfg.placement, cfg.dropout
        self.attention = Attention(cfg)
        self.cross = Attention(cfg) if cross else None
        self.feedforward = _build_feedforward(cfg.d_model, cfg.feedforward)
        if cfg.placement == "parallel":
            self.norm = build_norm(cfg.d_model, cfg.norm)
        else:
            self.norm_attention = build_norm(cfg.d_model, cfg.norm)
            self.norm_cross = build_norm(cfg.d_model, cfg.norm) if cross else None
            self.norm_feedforward = build_norm(cfg.d_model, cfg.norm) if self.feedforward is not None else None

    def forward(self, x: Float[Tensor, "B T D"], around: Surroundings, tap: Tap) -> Float[Tensor, "B T D"]:
        x = tap("resid_pre", x)
        match self.placement:
            case "pre":
                x = self._pre(x, around, tap)
            case "post":
                x = self._post(x, around, tap)
            case "parallel":
                x = self._parallel(x, around, tap)
            case _:
                assert_never(self.placement)
        return tap("resid_post", x)

    def _pre(self, x: Tensor, around: Surroundings, tap: Tap) -> Tensor:
        x = x + self._attend(tap("attention.normed", self.norm_attention(x)), around, tap)
        if self.cross is not None and self.norm_cross is not None:
            x = x + self._cross(tap("cross.normed", self.norm_cross(x)), around, tap)
        x = tap("resid_mid", x)
        if self.norm_feedforward is None:
            return x
        return x + self._feed(tap("feedforward.normed", self.norm_feedforward(x)), tap)

    def _post(self, x: Tensor, around: Surroundings, tap: Tap) -> Tensor:
        x = self.norm_attention(x + self._attend(x, around, tap))
        if self.cross is not None and self.norm_cross is not None:
            x = self.norm_cross(x + self._cross(x, around, tap))
        x = tap("resid_mid", x)
        return x if self.norm_feedforward is None else self.norm_feedforward(x + self._feed(x, tap))

    def _parallel(self, x: Tensor, around: Surroundings, tap: Tap) -> Tensor:
        normed = tap("attention.normed", self.norm(x))
        return x + self._attend(normed, around, tap) + self._feed(normed, tap)

    def _attend(self, x: Tensor, around: Surroundings, tap: Tap) -> Tensor:
        store = around.cache.layers[self.layer] if around.cache is not None else None
        view = around.views[self.layer]
        out = self.attention(x, view, scoped(tap, "attention."), around.rotation, around.bias, store, around.infusion)
        return F.dropout(out, self.dropout, self.training)

    def _cross(self, x: Tensor, around: Surroundings, tap: Tap) -> Tensor:
        assert self.cross is not None
        held = around.cache.cross[self.layer] if around.cache is not None else None
        if held is None:
            assert around.memory is not None
            held = self.cross.project_keys(around.memory)
            if around.cache is not None:
                around.cache.cross[self.layer] = held
        out = self.cross.attend(x, *held, around.memory_view, scoped(tap, "cross."))
        return F.dropout(out, self.dropout, self.training)

    def _feed(self, x: Tensor, tap: Tap) -> Tensor:
        assert self.feedforward is not None
        tap = scoped(tap, "feedforward.")
        return F.dropout(tap("out", self.feedforward(x, tap)), self.dropout, self.training)


def _build_feedforward(d_model: int, spec: c.FeedForward) -> Dense | Gated | MoE | None:
    match spec:
        case c.NoFeedForward():
            return None
        case c.MoE():
            return MoE(d_model, spec)
        case _:
            return build_dense(d_model, spec)
