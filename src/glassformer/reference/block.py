"""One block of a Transformer, forward: attention, cross-attention and feed-forward on the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass

from glassformer.config import ModelConfig, NoFeedForward, Rotary
from glassformer.reference.arrays import Array, Mask, Params, Saved, add_prefix, select_prefix
from glassformer.reference.attention import CosSin, attention
from glassformer.reference.feedforward import feedforward
from glassformer.reference.ops import normalize

Branch = Callable[[Array], tuple[Array, Saved]]
"""One branch of a block (attention, cross-attention or feed-forward): (B,T,D) -> (B,T,D) and saved activations."""


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of a block other than the residual stream: masks, positions and the output of the encoder."""

    allowed: Mask
    """(B,T,T): self-attention mask, True = may attend."""
    bias: Array | None
    """(B,H,T,T): score bias of ALiBi or T5."""
    cos_sin: CosSin | None
    """cos and sin of the rotary angles, (B,T,R/2) each."""
    qk_position: Array | None
    """(B,T,D): query/key position embedding."""
    memory: Array | None
    """(B,S,D): output of the encoder, in the decoder of an encoder-decoder."""
    memory_allowed: Mask | None
    """(B,T,S): cross-attention mask, True where the source token is real."""
    layer: int = 0
    """Index of the block, which decides its rotary positions and its feed-forward."""


def block(config: ModelConfig, weights: Params, x: Array, context: ForwardContext) -> tuple[Array, Saved]:
    """Compute one block: (B,T,D) -> (B,T,D).

        pre           x = x + r attention(norm(x)),  x = x + r cross(norm(x)),  x = x + r feedforward(norm(x))
        post          x = norm(x + r attention(x)),  and so on: the order of Vaswani et al. 2017
        after         x = x + r norm(attention(x)),  and so on: OLMo 2
        sandwich      x = x + r norm_out(attention(norm(x))),  and so on: Gemma 2
        parallel      n = norm(x),  x = x + r attention(n) + r feedforward(n): Wang and Komatsuzaki 2021 (GPT-J)
        parallel_two  x = x + r attention(norm_1(x)) + r feedforward(norm_2(x)): GPT-NeoX

    Each norm has its own parameters; r is the residual scale. Cross-attention exists only in the decoder of an
    encoder-decoder; an attention-only block has no feed-forward.
    """
    part, rotary = config.layer_feedforward(context.layer), config.layer_position(context.layer)
    own = rotary if isinstance(rotary, Rotary) else None

    def self_attention(n: Array) -> tuple[Array, Saved]:
        inside = select_prefix(weights, "attention")
        c = context
        return attention(config, inside, n, n, c.allowed, c.bias, c.cos_sin, c.qk_position, own)

    def cross_attention(n: Array) -> tuple[Array, Saved]:
        assert context.memory is not None
        assert context.memory_allowed is not None
        return attention(config, select_prefix(weights, "cross"), n, context.memory, context.memory_allowed)

    def feed_forward(n: Array) -> tuple[Array, Saved]:
        assert not isinstance(part, NoFeedForward)
        return feedforward(part, select_prefix(weights, "feedforward"), n)

    saved: Saved = {"resid_pre": x}
    if config.placement in ("parallel", "parallel_two"):
        total = x
        both: list[tuple[str, Branch]] = [("attention", self_attention), ("feedforward", feed_forward)]
        for name, branch in both:
            norm = "norm" if config.placement == "parallel" else f"norm_{name}"
            saved[f"{norm}.input"] = x
            out, saved_branch = branch(normalize(config.norm, weights, norm, x))
            total = total + config.residual_scale * out
            saved |= add_prefix(saved_branch, name)
        return total, saved | {"resid_post": total}
    branches: list[tuple[str, Branch]] = [("attention", self_attention)]
    if context.memory is not None:
        branches.append(("cross", cross_attention))
    if not isinstance(part, NoFeedForward):
        branches.append(("feedforward", feed_forward))
    for name, branch in branches:
        normed = name != "attention" or context.layer > 0 or config.first_norm
        x, saved_branch = residual(config, weights, name, branch, x, normed)
        saved |= saved_branch
    return x, saved | {"resid_post": x}


def residual(
    config: ModelConfig, weights: Params, name: str, branch: Branch, x: Array, normed: bool = True
) -> tuple[Array, Saved]:
    """Apply one branch with its residual connection, as the placement says (see `block`).

    The norm is the one called `norm_NAME`, for example `norm_attention`; the second norm of `sandwich` is
    `norm_NAME_out`. With `normed` False the branch reads x itself: the first attention of ModernBERT.
    """
    norm, saved = f"norm_{name}", Saved()
    n = x
    if config.placement in ("pre", "sandwich") and normed:
        saved[f"{norm}.input"] = x
        n = normalize(config.norm, weights, norm, x)
    out, saved_branch = branch(n)
    saved |= add_prefix(saved_branch, name)
    if config.placement in ("after", "sandwich"):
        after = norm if config.placement == "after" else f"{norm}_out"
        saved[f"{after}.input"] = out
        out = normalize(config.norm, weights, after, out)
    total = x + config.residual_scale * out
    if config.placement == "post":
        saved[f"{norm}.input"] = total
        total = normalize(config.norm, weights, norm, total)
    return total, saved
