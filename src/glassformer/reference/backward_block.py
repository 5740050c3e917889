"""Gradient of one block, derived by hand: the branches of `block` in block.py, from the last to the first."""

from collections.abc import Callable

import numpy as np

from glassformer.config import ModelConfig, NoFeedForward, Rotary
from glassformer.reference.arrays import Array, Params, Saved, add_prefix, select_prefix
from glassformer.reference.attention import CosSin
from glassformer.reference.backward_attention import attention_backward
from glassformer.reference.backward_feedforward import feedforward_backward
from glassformer.reference.backward_ops import normalize_backward


class BlockBackward:
    """Backward pass of one block. Call it with d_y: it returns d_x and stores the other gradients as attributes."""

    def __init__(
        self, config: ModelConfig, weights: Params, saved: Saved, cos_sin: CosSin | None, layer: int = 0
    ) -> None:
        self.config, self.weights, self.saved, self.cos_sin = config, weights, saved, cos_sin
        self.part, self.position = config.layer_feedforward(layer), config.layer_position(layer)
        self.gradients: Params = {}
        self.d_scores: Array = np.zeros(1)
        """(B,H,T,T): gradient of the self-attention scores, for the T5 bias table."""
        self.d_qk_position: Array = np.zeros(1)
        """(B,T,D): gradient of the query/key position embedding."""
        self.d_memory: Array | None = None
        """(B,S,D): gradient of the output of the encoder, if there is cross-attention."""

    def __call__(self, d_y: Array) -> Array:
        """Go through the branches in reverse order: d_y (B,T,D) -> d_x (B,T,D).

        Parallel: y = x + r attention(n) + r feedforward(n) with n = norm(x), so d_n is the sum over both branches.
        With two norms, each branch has its own n.
        """
        r = self.config.residual_scale
        if self.config.placement == "parallel":
            return d_y + self._norm("norm", self._attention(r * d_y) + self._feedforward(r * d_y))
        if self.config.placement == "parallel_two":
            d_x = d_y + self._norm("norm_feedforward", self._feedforward(r * d_y))
            return d_x + self._norm("norm_attention", self._attention(r * d_y))
        if not isinstance(self.part, NoFeedForward):
            d_y = self._residual("feedforward", self._feedforward, d_y)
        if "cross.pattern" in self.saved:
            d_y = self._residual("cross", self._cross, d_y)
        return self._residual("attention", self._attention, d_y)

    def _residual(self, name: str, branch: Callable[[Array], Array], d_y: Array) -> Array:
        """Backward pass of `residual`, where f' and norm' denote the backward passes of f and of the norm.

            pre        y = x + r f(norm(x))            d_x = d_y + norm'(f'(r d_y))
            post       y = norm(s), s = x + r f(x)     d_s = norm'(d_y),  d_x = d_s + f'(r d_s)
            after      y = x + r norm(f(x))            d_x = d_y + f'(norm'(r d_y))
            sandwich   y = x + r norm_out(f(norm(x)))  d_x = d_y + norm'(f'(norm_out'(r d_y)))

        With pre-norm, d_y reaches x unchanged; with post-norm, it always passes through the norm. Xiong et al. 2020.
        """
        r = self.config.residual_scale
        match self.config.placement:
            case "post":
                d_sum = self._norm(f"norm_{name}", d_y)
                return d_sum + branch(r * d_sum)
            case "after":
                return d_y + branch(self._norm(f"norm_{name}", r * d_y))
            case "sandwich":
                return d_y + self._norm(f"norm_{name}", branch(self._norm(f"norm_{name}_out", r * d_y)))
            case _ if f"norm_{name}.input" in self.saved:
                return d_y + self._norm(f"norm_{name}", branch(r * d_y))
            case _:  # the first layer of a model without its attention norm: y = x + r f(x)
                return d_y + branch(r * d_y)

    def _norm(self, name: str, d_y: Array) -> Array:
        d_x, gradients = normalize_backward(self.config.norm, self.weights, name, self.saved[f"{name}.input"], d_y)
        self.gradients |= gradients
        return d_x

    def _attention(self, d_y: Array) -> Array:
        weights, saved = select_prefix(self.weights, "attention"), select_prefix(self.saved, "attention")
        rotary = self.position if isinstance(self.position, Rotary) else None
        d = attention_backward(self.config, weights, saved, d_y, self.cos_sin, rotary)
        self.gradients |= add_prefix(d.params, "attention")
        self.d_scores, self.d_qk_position = d.scores, d.x + d.keys
        return d.x + d.memory  # in self-attention x is also the memory

    def _cross(self, d_y: Array) -> Array:
        weights, saved = select_prefix(self.weights, "cross"), select_prefix(self.saved, "cross")
        d = attention_backward(self.config, weights, saved, d_y)
        self.gradients |= add_prefix(d.params, "cross")
        self.d_memory = d.memory
        return d.x

    def _feedforward(self, d_y: Array) -> Array:
        assert not isinstance(self.part, NoFeedForward)
        weights, saved = select_prefix(self.weights, "feedforward"), select_prefix(self.saved, "feedforward")
        d_x, gradients = feedforward_backward(self.part, weights, saved, d_y)
        self.gradients |= add_prefix(gradients, "feedforward")
        return d_x
