"""Bugs of padding, batches and masks that become not-a-number."""

import torch

from tests.bugs.base import Around, Attention, Config
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import CrossAttention, Encoder
from tests.bugs.bug import plant
from tests.bugs.zoo_attention import ENCODER, EVERY, ROTARY, triangle

# pad_leak, left_pad_position, batch_variance, mask_nan


class MaskIgnored(Decoder):
    def visible(self, cache, new):
        allowed = super().visible(cache, new)
        return allowed | triangle(allowed)


class MaskIgnoredInLayer(Attention):
    def forward(self, x, around, cache=None):
        allowed = around.allowed | triangle(around.allowed)
        return super().forward(x, Around(around.queries, around.keys, allowed, around.real), cache)


class RightPaddingAssumed(Decoder):
    def visible(self, cache, new):
        allowed = super().visible(cache, new)
        index = torch.arange(len(cache))
        inside = index < cache.real.sum(1, keepdim=True)
        return (triangle(allowed) & inside[:, None, None, :]) | (index == index[len(cache) - new :, None])


class QueriesMasked(Encoder):
    def visible(self, cache, new):
        return cache.real[:, None, :, None] | torch.eye(new, dtype=torch.bool)


class SourceMaskIgnored(CrossAttention):
    def source_allowed(self, around, new):
        return torch.ones_like(super().source_allowed(around, new))


class PaddingForgotten(Decoder):
    def visible(self, cache, new):
        allowed = super().visible(cache, new)
        return allowed | triangle(allowed) if len(cache) > new else allowed


class CountsPadding(Decoder):
    def count_positions(self, cache, real):
        return (len(cache) + torch.arange(real.shape[1])).expand(real.shape)


class CountsPaddingWhenCached(Decoder):
    def count_positions(self, cache, real):
        if len(cache) == 0:
            return super().count_positions(cache, real)
        return (len(cache) + torch.arange(real.shape[1])).expand(real.shape)


class FirstRowsMask(Decoder):
    def visible(self, cache, new):
        allowed = super().visible(cache, new)
        return allowed[:1].expand_as(allowed)


class CentredOverBatch(Decoder):
    def embed(self, idx, positions):
        x = super().embed(idx, positions)
        return x - 0.1 * x.mean(0, keepdim=True)


class EmptyRows(Decoder):
    def visible(self, cache, new):
        allowed = super().visible(cache, new)
        return allowed & cache.real[:, None, None, :]


class Float32Constant(Attention):
    def fill(self, dtype):
        return float(torch.tensor(torch.finfo(torch.float32).min).to(dtype))


class ZeroTimesInfinity(Attention):
    def hide(self, scores, allowed):
        return scores + (~allowed).to(scores.dtype) * float("-inf")


HF_LIKE = Config(position="rotary", mask_fill="min", see_self=False)
PADDING = (
    plant(
        *("mask_ignored", "pad_leak", "the attention mask does nothing but count"),
        at={"": MaskIgnored},
        catalogue=(10, 60),
    ),
    plant(
        *("mask_ignored_one_layer", "pad_leak", "layer 1 ignores the attention mask"),
        ROTARY,
        at={"blocks.1.attention": MaskIgnoredInLayer},
        layer=1,
    ),
    plant(*("right_padding_assumed", "pad_leak", "padding is taken to be on the right"), at={"": RightPaddingAssumed}),
    plant(
        *("queries_masked", "pad_leak", "an encoder masks padding queries, not padding keys"),
        ENCODER,
        at={"": QueriesMasked},
    ),
    plant(
        *("source_mask_ignored", "pad_leak", "cross-attention sees source padding"),
        Config(kind="seq2seq"),
        at={"blocks.*.cross": SourceMaskIgnored},
        catalogue=(58, 59),
    ),
    plant(
        *("padding_forgotten", "pad_leak", "steps through the cache see the prompt's padding"),
        ROTARY,
        at={"": PaddingForgotten},
        also=("cache_mask", "cache_mismatch"),
        catalogue=(41,),
        special="padding then cache",
    ),
    plant(*("counts_padding", "left_pad_position", "positions count padding"), at={"": CountsPadding}, catalogue=(40,)),
    plant(
        *("counts_padding_when_cached", "left_pad_position", "decoded tokens of padded rows stand too far"),
        at={"": CountsPaddingWhenCached},
        also=("decode_position",),
        catalogue=(39, 41),
        special="padding then cache",
    ),
    plant(
        *("mask_of_first_row", "batch_variance", "row 0's padding mask is used for every row"),
        ROTARY,
        at={"": FirstRowsMask},
        also=("pad_leak",),
        special="padding",
    ),
    plant(
        *("centred_over_batch", "batch_variance", "the embedding is centred over the batch"), at={"": CentredOverBatch}
    ),
    plant(
        *("empty_rows", "mask_nan", "a padding place sees nothing, and its NaN spreads"),
        at={"": EmptyRows},
        catalogue=(61,),
        special="padding",
    ),
    plant(
        *("float32_constant", "mask_nan", "the float32 minimum becomes -inf in half precision"),
        HF_LIKE,
        at={EVERY: Float32Constant},
        catalogue=(62,),
        special="half precision",
    ),
    plant(
        *("zero_times_infinity", "mask_nan", "layer 2 adds mask times -inf: 0 times infinity"),
        at={"blocks.2.attention": ZeroTimesInfinity},
        layer=2,
        catalogue=(62,),
    ),
)

BUGS = PADDING
