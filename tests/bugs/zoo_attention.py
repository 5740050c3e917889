"""Bugs of causality and masks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bugs.base import Around, Attention, Block, Config
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import CrossAttention, Encoder, EncoderDecoder
from tests.bugs.bug import plant

EVERY = "blocks.*.attention"
ROTARY = Config(position="rotary", norm="rmsnorm", activation="swiglu", n_kv_heads=2)
WINDOWED = Config(position="rotary", window=8)
ENCODER = Config(kind="encoder")


def ones(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.ones(len(queries), len(keys), dtype=torch.bool)


def triangle(allowed: Tensor) -> Tensor:
    """The plain causal pattern (T,S) for a mask of the same shape."""
    T, S = allowed.shape[-2:]
    return torch.arange(S)[None, :] <= torch.arange(S - T, S)[:, None]


# causal_leak


class NoCausalMask(Decoder):
    def pattern(self, queries, keys):
        return ones(queries, keys)


class LeakyLayer(Attention):
    def forward(self, x, around, cache=None):
        everything = around.real[:, None, None, :].expand_as(around.allowed)
        return super().forward(x, Around(around.queries, around.keys, everything, around.real), cache)


class LeakyHead(Attention):
    def hide(self, scores, allowed):
        allowed = allowed.repeat(1, self.cfg.n_heads, 1, 1)
        allowed[:, 2] = allowed[:, 2].any(-2, keepdim=True)
        return super().hide(scores, allowed)


class LeakyInTraining(Decoder):
    def pattern(self, queries, keys):
        return ones(queries, keys) if self.training else super().pattern(queries, keys)


class SeesNextToken(Decoder):
    def pattern(self, queries, keys):
        return keys[None, :] <= queries[:, None] + 1


class MaskEndsAt64(Decoder):
    def pattern(self, queries, keys):
        return super().pattern(queries, keys) | ((queries >= 64)[:, None] & (keys >= 64)[None, :])


class BlockMeans(Block):
    def forward(self, x, around, cache=None):
        whole = x.shape[1] // 8 * 8
        means = x[:, :whole].unflatten(1, (-1, 8)).mean(2).repeat_interleave(8, 1)
        return super().forward(x + 0.1 * F.pad(means, (0, 0, 0, x.shape[1] - whole)), around, cache)


class CentredEmbedding(Decoder):
    def embed(self, idx, positions):
        x = super().embed(idx, positions)
        return x - 0.1 * x.mean(1, keepdim=True)


class SymmetricWindow(Decoder):
    def pattern(self, queries, keys):
        return (queries[:, None] - keys[None, :]).abs() < self.cfg.window


class CausalOnlyWithMask(Decoder):
    def forward(self, idx, attention_mask=None, positions=None, cache=None):
        self.masked = attention_mask is not None
        return super().forward(idx, attention_mask, positions, cache)

    def pattern(self, queries, keys):
        return super().pattern(queries, keys) if self.masked else ones(queries, keys)


class WrongPolarity(Decoder):
    def pattern(self, queries, keys):
        return keys[None, :] >= queries[:, None]


class LeakyKernel(Attention):
    def kernel(self, q, k, v, allowed, bias):
        return super().kernel(q, k, v, allowed.any(-2, keepdim=True).expand_as(allowed), bias)


class MaskMultiplies(Attention):
    def hide(self, scores, allowed):
        return scores * allowed


class LeakyTarget(EncoderDecoder):
    def pattern(self, queries, keys):
        return ones(queries, keys)


LEAKS = (
    plant(
        *("no_causal_mask", "causal_leak", "no causal mask anywhere"),
        at={"": NoCausalMask},
        catalogue=(1, 9),
    ),
    plant(
        *("leak_one_layer", "causal_leak", "layer 1 sees every real token, the other layers are causal"),
        ROTARY,
        at={"blocks.1.attention": LeakyLayer},
        layer=1,
    ),
    plant(
        *("leak_one_head", "causal_leak", "one head of layer 2 sees every real token"),
        at={"blocks.2.attention": LeakyHead},
        layer=2,
    ),
    plant(
        *("leak_in_training", "causal_leak", "the mask is dropped in train mode only"),
        at={"": LeakyInTraining},
        also=("position_train_infer",),
        catalogue=(2,),
        special="train",
    ),
    plant(*("leak_next_token", "causal_leak", "the triangle is one diagonal too wide"), ROTARY, at={"": SeesNextToken}),
    plant(
        *("leak_beyond_64", "causal_leak", "the mask is a buffer of 64: later tokens see one another"),
        at={"": MaskEndsAt64},
        catalogue=(7, 11),
        special="long",
    ),
    plant(
        *("leak_block_means", "causal_leak", "means over blocks of 8 tokens enter layer 1, outside attention"),
        at={"blocks.1": BlockMeans},
        layer=1,
        catalogue=(6,),
    ),
    plant(
        *("leak_centred_embedding", "causal_leak", "the embedding is centred over time"),
        at={"": CentredEmbedding},
        catalogue=(6,),
    ),
    plant(
        *("leak_symmetric_window", "causal_leak", "the window is kept, the triangle is lost"),
        WINDOWED,
        at={"": SymmetricWindow},
        also=("window",),
        catalogue=(5,),
    ),
    plant(
        *("leak_without_mask_argument", "causal_leak", "causal only when an attention_mask is passed"),
        at={"": CausalOnlyWithMask},
        catalogue=(8,),
    ),
    plant(
        *("leak_wrong_polarity", "causal_leak", "mask polarity: each token sees itself and the future"),
        at={"": WrongPolarity},
        also=("over_mask",),
        catalogue=(9,),
    ),
    plant(
        *("leak_fused_layer", "causal_leak", "the fused kernel of layer 0 gets no causal mask"),
        Config(fused=True, position="rotary"),
        at={"blocks.0.attention": LeakyKernel},
        layer=0,
        catalogue=(1,),
    ),
    plant(
        *("leak_mask_multiplies", "causal_leak", "scores are multiplied by the mask, so hidden keys score 0"),
        at={EVERY: MaskMultiplies},
        also=("mask_value",),
    ),
    plant(
        *("leak_target", "causal_leak", "the decoder of an encoder-decoder sees the whole target"),
        Config(kind="seq2seq"),
        at={"": LeakyTarget},
    ),
)


# mask_value


class MinusTenThousand(Attention):
    def fill(self, dtype):
        return -1e4


class MinusThirty(Attention):
    def fill(self, dtype):
        return -30.0


@torch.no_grad()
def sharpen(model: nn.Module) -> None:
    """Scores of the size that long training reaches: some fall below -10,000."""
    for block in model.blocks:
        block.attention.q_proj.weight.mul_(1500)
        block.attention.k_proj.weight.mul_(1500)


MASK_VALUES = (
    plant(
        *("mask_minus_1e4", "mask_value", "hidden scores are -10,000"), at={EVERY: MinusTenThousand}, catalogue=(3, 4)
    ),
    plant(
        *("mask_minus_1e4_sharp", "mask_value", "hidden scores are -10,000 and real ones fall below"),
        Config(position="rotary"),
        at={EVERY: MinusTenThousand},
        dress=sharpen,
        also=("causal_leak",),
        catalogue=(3, 4),
    ),
    plant(
        *("mask_minus_30_one_layer", "mask_value", "hidden scores of layer 1 are -30"),
        at={"blocks.1.attention": MinusThirty},
        layer=1,
        also=("causal_leak",),
    ),
)


# over_mask


class NotItself(Decoder):
    def visible(self, cache, new):
        allowed = super().visible(cache, new)
        S = allowed.shape[-1]
        others = allowed & (torch.arange(S)[None, :] != torch.arange(S - new, S)[:, None])
        return others | (allowed & ~others.any(-1, keepdim=True))


class FarKeysHidden(Decoder):
    def pattern(self, queries, keys):
        return super().pattern(queries, keys) & (queries[:, None] - keys[None, :] < 32)


class FirstTokenHidden(Attention):
    def hide(self, scores, allowed):
        others = allowed.clone()
        others[..., 0] = False
        return super().hide(scores, others | (allowed & ~others.any(-1, keepdim=True)))


class CausalEncoder(Encoder):
    def pattern(self, queries, keys):
        return keys[None, :] <= queries[:, None]


class SquareCross(CrossAttention):
    def source_allowed(self, around, new):
        allowed = super().source_allowed(around, new)
        return allowed & (torch.arange(allowed.shape[-1]) <= around.queries[:, None, :, None])


OVER_MASKS = (
    plant(*("over_mask_diagonal", "over_mask", "a token does not see itself"), at={"": NotItself}),
    plant(
        *("over_mask_far_keys", "over_mask", "keys 32 and more places back are hidden, no window declared"),
        ROTARY,
        at={"": FarKeysHidden},
        also=("window",),
        special="long",
    ),
    plant(
        *("over_mask_first_token", "over_mask", "layer 1 hides the first token from all others"),
        at={"blocks.1.attention": FirstTokenHidden},
        layer=1,
    ),
    plant(*("over_mask_causal_encoder", "over_mask", "an encoder with a causal mask"), ENCODER, at={"": CausalEncoder}),
    plant(
        *("over_mask_square_cross", "over_mask", "cross-attention sees no source place beyond the target's own"),
        Config(kind="seq2seq"),
        at={"blocks.*.cross": SquareCross},
    ),
)


# window


class WindowPlusOne(Decoder):
    def within(self, queries, keys):
        return queries[:, None] - keys[None, :] <= self.cfg.window


class WindowMinusOne(Decoder):
    def within(self, queries, keys):
        return queries[:, None] - keys[None, :] < self.cfg.window - 1


class NoWindowLayer(Attention):
    def forward(self, x, around, cache=None):
        allowed = around.allowed | (triangle(around.allowed) & around.real[:, None, None, :])
        return super().forward(x, Around(around.queries, around.keys, allowed, around.real), cache)


class NoWindowWhenCached(Decoder):
    def within(self, queries, keys):
        return ones(queries, keys) if len(keys) > len(queries) else super().within(queries, keys)


WINDOWS = (
    plant(
        *("window_off_by_one", "window", "one key too many is visible"),
        WINDOWED,
        at={"": WindowPlusOne},
        catalogue=(30,),
    ),
    plant(
        *("window_one_short", "window", "one key too few is visible"),
        WINDOWED,
        at={"": WindowMinusOne},
        catalogue=(30,),
    ),
    plant(
        *("window_missing_in_one_layer", "window", "layer 2 ignores the window"),
        WINDOWED,
        at={"blocks.2.attention": NoWindowLayer},
        layer=2,
    ),
    plant(
        *("window_ignored_when_cached", "window", "steps through the cache ignore the window"),
        WINDOWED,
        at={"": NoWindowWhenCached},
        also=("cache_mismatch", "cache_mask"),
        catalogue=(31,),
    ),
)

BUGS = LEAKS + MASK_VALUES + OVER_MASKS + WINDOWS
