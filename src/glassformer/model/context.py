"""What enters a forward pass and is shared by all blocks: the tap, checked inputs, positions, masks, KV cache.

`check_inputs` validates once, at the public methods of the three models. `forward_context` is the only place where
positions and masks are computed. Causality and windows go by the index of a token in its sequence, not by its position
id, so that shifted or repeated positions never reveal the future.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from glassformer.model.cache import Cache, LayerCache
from glassformer.model.masks import causal, padding, window
from glassformer.model.positions import NoPosition, Rotation
from glassformer.shapes import Bool, Float, Int, Shaped

if TYPE_CHECKING:
    from glassformer.model.block import Stack
    from glassformer.model.layers import Embed

Pattern = Bool[Tensor, "B T S"] | Bool[Tensor, "B L T S"]
Mask = Bool[Tensor, "B T"] | Pattern | None


@runtime_checkable
class Tap(Protocol):
    """What a forward pass calls at each site: it may record the tensor, or return another one in its place.

    At a site the model writes `x = tap("resid_mid", x)`. Without a tap that call returns its argument, and attention
    uses its fused kernel. `wants` is called before something is computed only to be recorded.

    Sites of a decoder-only model (an encoder-decoder puts `encoder.` or `decoder.` before `embed`, `blocks` and
    `final`):

        embed                            (B,T,D)  tokens (+ segments, + positions, normed)
        blocks.I.resid_pre                (B,T,D)  the stream entering block I
        blocks.I.attention.normed         (B,T,D)  what attention reads (pre-norm and parallel placement), without
                                                  query/key positions
        blocks.I.attention.q              (B,H,T,K)  after QK-norm and rotation
        blocks.I.attention.k              (B,G,S,K)  cached and new
        blocks.I.attention.v              (B,G,S,U)
        blocks.I.attention.scores         (B,H,T,S)  scaled, biased and masked: what softmax reads
        blocks.I.attention.pattern        (B,H,T,S)
        blocks.I.attention.heads          (B,H,T,U)  pattern @ v, before the output projection
        blocks.I.attention.out            (B,T,D)    output of the projection: what is added to the stream, unless
        blocks.I.attention.out_normed     (B,T,D)    ... a norm follows it (placements after and sandwich)
        blocks.I.cross.*                  the same, over the encoder's output
        blocks.I.resid_mid                (B,T,D)  between attention (and cross-attention) and feed-forward; an
                                                  attention-only block has no feedforward.* sites
        blocks.I.feedforward.normed       (B,T,D)
        blocks.I.feedforward.pre          (B,T,F)  before the activation (a gate's, when gated)
        blocks.I.feedforward.post         (B,T,F)  what the down projection reads
        blocks.I.feedforward.router       (B,T,E)  probabilities over experts
        blocks.I.feedforward.choice       (B,T,A)  experts chosen
        blocks.I.feedforward.out          (B,T,D)
        blocks.I.feedforward.out_normed   (B,T,D)  what is added to the stream with placements after and sandwich
        blocks.I.resid_post               (B,T,D)
        final                            (B,T,D)  what the head reads
        logits                           (B,T,V)
    """

    def __call__(self, site: str, value: Tensor) -> Tensor: ...

    def wants(self, site: str) -> bool: ...


class NoTap:
    """Records nothing, changes nothing."""

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return value

    def wants(self, site: str) -> bool:
        return False


NO_TAP = NoTap()


class Scoped:
    """A tap whose sites all start with a prefix: a block names its sites without knowing its number."""

    def __init__(self, tap: Tap, prefix: str):
        self.tap, self.prefix = tap, prefix

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return self.tap(self.prefix + site, value)

    def wants(self, site: str) -> bool:
        return self.tap.wants(self.prefix + site)


def innermost(tap: Tap) -> Tap:
    """Return the tap that the sites of a block reach: a tap that passes them on to another one holds it as `tap`."""
    while (inner := getattr(tap, "tap", None)) is not None:
        tap = inner
    return tap


def scoped(tap: Tap, prefix: str) -> Tap:
    """`tap` under a prefix; the no-op tap stays itself, so an unwatched forward builds no strings."""
    return tap if tap is NO_TAP else Scoped(tap, prefix)


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


@dataclass(frozen=True)
class LayerPositions:
    """Position schemes of layers that differ from the model's."""

    others: list[NoPosition]
    index: list[int]
    """For each layer: 0 for the model's own scheme, n for others[n - 1]."""


def forward_context(
    x: Float[Tensor, "B T W"],
    scheme: NoPosition,
    windows: Sequence[int | None],
    is_causal: bool,
    mask: Mask = None,
    positions: Int[Tensor, "#B T"] | None = None,
    cache: Cache | None = None,
    memory: Float[Tensor, "B N D"] | None = None,
    memory_mask: Bool[Tensor, "B N"] | None = None,
    kinds: LayerPositions | None = None,
    score_bias: NoPosition | None = None,
) -> ForwardContext:
    """Compute positions, masks and position biases for the new tokens x, and record the tokens in the cache.

    `mask` is (B,T), True at real tokens, or (B,T,S), the whole pattern, or (B,L,T,S), that of each layer: windows are
    then part of it. `windows` has one entry per layer. `kinds` are the schemes of layers that rotate in another way
    than `scheme`. `score_bias` is a second scheme that only adds to the scores.
    """
    tokens = Cache(x.device) if cache is None else cache  # without a cache, a temporary one does the counting
    is_pattern = mask is not None and mask.dim() > 2
    positions = tokens.append(x.shape[1], positions, None if is_pattern else mask)
    biased = [s for s in (scheme, score_bias) if s is not None and s.has_bias]
    bias = add_biases([s.bias(positions, tokens.key_positions(), x.dtype) for s in biased])
    last = tokens.last_position(positions)
    rotations = [scheme.rotation(positions, x.dtype, last)]
    rotations += [] if kinds is None else [other.rotation(positions, x.dtype, last) for other in kinds.others]
    which = [0] * len(windows) if kinds is None else kinds.index
    qk_embedding = scheme.qk_embedding(positions, x.dtype)
    masks = attention_masks(tokens, windows, is_causal, mask if is_pattern else None, bias)
    stores = [None] * len(windows) if cache is None else cache.layers
    layers = [AttentionContext(*m, rotations[i], qk_embedding, s) for m, i, s in zip(masks, which, stores, strict=True)]
    return ForwardContext(positions, layers, cache, memory, None if memory_mask is None else padding(memory_mask))


def add_biases(biases: list[Float[Tensor, "#B H T S"] | None]) -> Float[Tensor, "#B H T S"] | None:
    """Return the sum of the biases that position schemes add to the scores; None without any."""
    total = None
    for bias in biases:
        total = bias if total is None or bias is None else total + bias
    return total


def attention_masks(
    tokens: Cache,
    windows: Sequence[int | None],
    is_causal: bool,
    pattern: Pattern | None = None,
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
    pattern: Pattern | None,
    bias: Float[Tensor, "#B H T S"] | None,
) -> list[tuple[Tensor | None, bool]]:
    """One mask per kind of layer, with the bias added. Layers without a window keep the fused causal triangle."""
    if pattern is not None:
        mask = _complete(pattern, tokens, len(windows))
        if mask.dim() == 3:
            return [(_with_bias(mask[:, None], bias), False)] * len(windows)
        return [(_with_bias(mask[:, layer, None], bias), False) for layer in range(len(windows))]
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


def _complete(pattern: Pattern, tokens: Cache, n_layers: int) -> Pattern:
    """Check the shape of a whole pattern. A query that may attend to nothing attends to itself."""
    queries, keys = tokens.query_index(), tokens.key_index()
    layers = () if pattern.dim() == 3 else (n_layers,)
    if pattern.shape[1:] != (*layers, len(queries), len(keys)):
        raise ValueError(
            f"mask of shape {tuple(pattern.shape)} does not fit {len(queries)} queries over {len(keys)} keys in "
            f"{n_layers} layers: a whole pattern is (batch, new tokens, cached and new tokens), with the layers after "
            "the batch if they differ."
        )
    itself = keys[None, :] == queries[:, None]
    return pattern | (itself & ~pattern.any(-1, keepdim=True))


def _with_bias(mask: Bool[Tensor, "#B 1 T S"], bias: Float[Tensor, "#B H T S"] | None) -> Shaped[Tensor, "..."]:
    return mask if bias is None else bias.masked_fill(~mask, float("-inf"))


def check_inputs(
    embed: "Embed",
    stack: "Stack",
    tokens: Any,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    cache: Cache | None = None,
) -> None:
    """Refuse inputs that the model cannot compute with, in one sentence each."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        given = f"dtype {tokens.dtype}" if isinstance(tokens, Tensor) else f"type {type(tokens).__name__}"
        raise ValueError(f"tokens are of {given}: pass a tensor of whole numbers, such as torch.tensor([[1, 2]]).")
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] == 0:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: pass (batch, length), neither of them 0.")
    if mask is not None:
        _check_mask(tokens, mask)
    _check_ids(tokens, embed.tokens.num_embeddings, "token", "vocabulary")
    if segments is not None:
        if embed.segments is None:
            raise ValueError("segments were given to a model without segment embeddings: leave them out.")
        _check_ids(segments, embed.segments.num_embeddings, "segment", "segments")
    if stack.max_position is not None and not torch.compiler.is_compiling():
        _check_positions(stack.max_position, tokens, mask, positions, cache)
    limit = stack.changes_frequencies_at
    if limit is not None and cache is not None and 0 < cache.length <= limit < cache.length + tokens.shape[1]:
        raise ValueError(
            f"the sequence would grow from {cache.length} to {cache.length + tokens.shape[1]} tokens, but the rotary "
            f"frequencies of this model change beyond {limit}, also for cached keys: compute the whole sequence anew."
        )


def _check_mask(tokens: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}: it must be boolean, True = real token (use mask.bool()).")
    if mask.dim() == 2 and mask.shape != tokens.shape:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(tokens.shape)}: "
            "it marks which of the new tokens are real."
        )


def _check_ids(ids: Tensor, size: int, what: str, where: str) -> None:
    """Check the range on a CPU only: elsewhere it would wait for the device, which reports an error itself."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"{what} id {bad} is outside the {where} of {size} (0 to {size - 1}).")


def _check_positions(
    limit: int, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None
) -> None:
    """Refuse positions that a learned table does not have."""
    first, new = 0, tokens.shape[1]
    if positions is not None:
        first, last = int(positions.min()), int(positions.max())
    elif mask is not None and mask.dim() == 2:
        start = cache.next_position() if cache is not None else 0
        last = int((start + mask.sum(1, keepdim=True) - 1).max())
    elif cache is not None and cache.positions is not None:
        last = int(cache.next_position().max()) + new - 1
    else:  # known without waiting for a device, also while a CUDA graph is captured
        last = new - 1 + (0 if cache is None else cache.length)
    if first < 0 or last >= limit:
        raise ValueError(
            f"position {first if first < 0 else last} is outside a learned table of {limit} positions "
            f"(0 to {limit - 1}): shorten the sequence, or use a model with a longer context."
        )
