"""What all blocks share in one forward pass: positions, attention masks, position biases, KV cache.

`forward_context` is the only place where positions and masks are computed. Causality and windows go by the index of a
token in its sequence, not by its position id, so that shifted or repeated positions never reveal the future.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.model.cache import Cache, LayerCache
from glassformer.model.masks import causal, padding, window
from glassformer.model.positions import NoPosition, Rotation
from glassformer.shapes import Bool, Float, Int, Shaped


@dataclass(frozen=True)
class AttentionContext:
    """What one attention layer needs in addition to its input."""

    mask: Shaped[Tensor, "*#m #T S"] | None = None
    """Boolean (True = may attend), or a bias that is added to the scores, -inf where attention is not allowed."""
    is_causal: bool = False
    """True: the mask is the plain causal triangle, and `mask` is None."""
    rotation: Rotation | None = None
    """Rotates queries and new keys."""
    qk_embedding: Float[Tensor, "#B T D"] | None = None
    """Position embedding that is added to the input of queries and keys, but not of values."""
    cache: LayerCache | None = None


@dataclass(frozen=True)
class ForwardContext:
    """Everything that the blocks of one stack share in one forward pass."""

    positions: Int[Tensor, "#B T"]
    layers: Sequence[AttentionContext]
    """One per layer: layers may differ in their window, and each has its own cache."""
    cache: Cache | None = None
    memory: Float[Tensor, "B S D"] | None = None
    """Output of the encoder, read by cross-attention. None once its keys and values are cached."""
    memory_mask: Bool[Tensor, "B 1 1 S"] | None = None


def forward_context(
    x: Float[Tensor, "B T D"],
    scheme: NoPosition,
    windows: Sequence[int | None],
    is_causal: bool,
    mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None = None,
    positions: Int[Tensor, "#B T"] | None = None,
    cache: Cache | None = None,
    memory: Float[Tensor, "B N D"] | None = None,
    memory_mask: Bool[Tensor, "B N"] | None = None,
) -> ForwardContext:
    """Compute positions, masks and position biases for the new tokens x, and record the tokens in the cache.

    `mask` is (B,T), True at real tokens, or (B,T,S), the whole pattern. `windows` has one entry per layer.
    """
    tokens = Cache(x.device) if cache is None else cache  # without a cache, a temporary one does the counting
    is_pattern = mask is not None and mask.dim() == 3
    positions = tokens.append(x.shape[1], positions, None if is_pattern else mask)
    bias = scheme.bias(positions, tokens.key_positions(), x.dtype) if scheme.has_bias else None
    rotation = scheme.rotation(positions, x.dtype, tokens.last_position(positions))
    qk_embedding = scheme.qk_embedding(positions, x.dtype)
    masks = attention_masks(tokens, windows, is_causal, mask if is_pattern else None, bias)
    stores = [None] * len(windows) if cache is None else cache.layers
    layers = [AttentionContext(*m, rotation, qk_embedding, s) for m, s in zip(masks, stores, strict=True)]
    return ForwardContext(positions, layers, cache, memory, None if memory_mask is None else padding(memory_mask))


def attention_masks(
    tokens: Cache,
    windows: Sequence[int | None],
    is_causal: bool,
    pattern: Bool[Tensor, "B T S"] | None = None,
    bias: Float[Tensor, "#B H T S"] | None = None,
) -> list[tuple[Tensor | None, bool]]:
    """Return (mask, is_causal) for each layer. No mask is built where none is needed."""
    T, S = tokens.new, tokens.n_keys
    plain = pattern is None and bias is None and tokens.real is None and not tokens.fixed
    if plain and (not is_causal or T in (1, S)) and all(w is None or w >= S for w in windows):
        return [(None, is_causal and T > 1)] * len(windows)
    return _explicit_masks(tokens, windows, is_causal, pattern, bias)


def _explicit_masks(
    tokens: Cache,
    windows: Sequence[int | None],
    is_causal: bool,
    pattern: Bool[Tensor, "B T S"] | None,
    bias: Float[Tensor, "#B H T S"] | None,
) -> list[tuple[Tensor | None, bool]]:
    """One mask per kind of layer, with the bias added. Layers without a window keep the fused causal triangle."""
    if pattern is not None:
        mask = _complete(pattern, tokens)
        return [(_with_bias(mask[:, None], bias), False)] * len(windows)
    T, S = tokens.new, tokens.n_keys
    made: dict[int | None, tuple[Tensor | None, bool]] = {}
    for w in set(windows):
        open_ = (w is None or w >= S) and tokens.real is None and not tokens.fixed  # nothing but causality forbids
        if open_ and (not is_causal or T == 1):
            made[w] = (bias, False)
        elif open_ and bias is None and T == S:
            made[w] = (None, True)
        else:
            made[w] = (_with_bias(_explicit_mask(tokens, is_causal, w), bias), False)
    return [made[w] for w in windows]


def _explicit_mask(tokens: Cache, is_causal: bool, width: int | None) -> Bool[Tensor, "#B 1 T S"]:
    """Combine causality, window and padding. A query that may attend to nothing attends to itself."""
    queries, keys, real = tokens.query_index(), tokens.key_index(), tokens.key_real()
    allowed = torch.ones(queries.shape[0], keys.shape[0], dtype=torch.bool, device=keys.device)
    if is_causal:
        allowed = causal(queries, keys)
    if width is not None:
        allowed = allowed & window(queries, keys, width)
    allowed = allowed[None, None]
    return allowed if real is None else (allowed & padding(real)) | (keys[None, :] == queries[:, None])


def _complete(pattern: Bool[Tensor, "B T S"], tokens: Cache) -> Bool[Tensor, "B T S"]:
    """Check the shape of a whole pattern. A query that may attend to nothing attends to itself."""
    queries, keys = tokens.query_index(), tokens.key_index()
    if pattern.shape[1:] != (len(queries), len(keys)):
        raise ValueError(
            f"mask of shape {tuple(pattern.shape)} does not fit {len(queries)} queries over {len(keys)} keys: "
            "a whole pattern is (batch, new tokens, cached and new tokens)."
        )
    itself = keys[None, :] == queries[:, None]
    return pattern | (itself & ~pattern.any(-1, keepdim=True))


def _with_bias(mask: Bool[Tensor, "#B 1 T S"], bias: Float[Tensor, "#B H T S"] | None) -> Shaped[Tensor, "..."]:
    return mask if bias is None else bias.masked_fill(~mask, float("-inf"))
