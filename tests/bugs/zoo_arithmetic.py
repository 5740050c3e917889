"""Bugs of the arithmetic of attention: scale, softmax, heads."""

import torch
from torch import nn

from tests.bugs.base import Attention, Config
from tests.bugs.bug import plant, spelled_nanogpt
from tests.bugs.zoo_attention import ENCODER, EVERY, ROTARY

# attn_scale, softmax_axis, head_layout


def rescaled(layers: tuple[int, ...], scale: float):
    def tamper(model: nn.Module) -> None:
        for layer in layers:
            model.blocks[layer].attention.scale = scale

    return tamper


class SoftmaxOverHeads(Attention):
    def normalise(self, scores):
        return torch.softmax(scores, dim=1)


class SoftmaxOverQueries(Attention):
    def normalise(self, scores):
        return torch.softmax(scores, dim=-2)


class SoftmaxOverBatch(Attention):
    def normalise(self, scores):
        return torch.softmax(scores, dim=0)


class MergeWithoutTranspose(Attention):
    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


class SplitWithoutTranspose(Attention):
    def split(self, x, heads):
        return x.reshape(x.shape[0], heads, x.shape[1], -1)


class TiledGroups(Attention):
    def share(self, x):
        return x.repeat(1, self.cfg.n_heads // self.cfg.n_kv_heads, 1, 1)


class SoftmaxTwice(Attention):
    def normalise(self, scores):
        weights = super().normalise(scores)
        return torch.softmax(weights.masked_fill(scores == self.fill(scores.dtype), float("-inf")), dim=-1)


class SoftmaxTwiceUnmasked(Attention):
    def normalise(self, scores):
        return torch.softmax(super().normalise(scores), dim=-1)


class SquaredWeights(Attention):
    def normalise(self, scores):
        return super().normalise(scores).square()


class SquaredAndRenormalised(Attention):
    def normalise(self, scores):
        squared = super().normalise(scores) ** 2
        return squared / squared.sum(-1, keepdim=True)


class RootedWeights(Attention):
    def normalise(self, scores):
        return super().normalise(scores).sqrt()


ALL3 = (0, 1, 2)
ARITHMETIC = (
    plant(
        *("scale_missing_nanogpt", "attn_scale", "scores are not scaled; the config is spelled like nanoGPT's"),
        tamper=rescaled(ALL3, 1.0),
        dress=spelled_nanogpt,
    ),
    plant(*("scale_missing", "attn_scale", "scores are not scaled"), tamper=rescaled(ALL3, 1.0)),
    plant(
        *("scale_d_model", "attn_scale", "1/sqrt(d_model)"), ROTARY, tamper=rescaled(ALL3, 48**-0.5), catalogue=(51,)
    ),
    plant(
        *("scale_inverted", "attn_scale", "multiplied by sqrt(d_head)"), tamper=rescaled(ALL3, 12**0.5), catalogue=(52,)
    ),
    plant(
        *("scale_heads_one_layer", "attn_scale", "1/sqrt(number of heads) in layer 2"),
        tamper=rescaled((2,), 4**-0.5),
        layer=2,
        catalogue=(53,),
    ),
    plant(
        *("scale_fused", "attn_scale", "the fused kernel is handed 1/d_head"),
        Config(fused=True, position="alibi"),
        tamper=rescaled(ALL3, 1 / 12),
    ),
    plant(
        *("softmax_over_heads", "softmax_axis", "softmax over heads; hidden scores are finite"),
        Config(mask_fill="min"),
        at={EVERY: SoftmaxOverHeads},
        also=("causal_leak",),
    ),
    plant(
        *("softmax_over_queries", "softmax_axis", "softmax over queries in layer 1"),
        ROTARY,
        at={"blocks.1.attention": SoftmaxOverQueries},
        layer=1,
        also=("causal_leak",),
        catalogue=(54,),
    ),
    plant(
        *("softmax_over_queries_encoder", "softmax_axis", "softmax over queries in an encoder"),
        ENCODER,
        at={EVERY: SoftmaxOverQueries},
        catalogue=(54,),
    ),
    plant(
        *("softmax_over_batch", "softmax_axis", "softmax over the batch in an encoder"),
        ENCODER,
        at={EVERY: SoftmaxOverBatch},
        also=("batch_variance",),
        catalogue=(55,),
    ),
    plant(
        *("softmax_twice", "attention_weights", "softmax is applied to the attention weights again, masked again"),
        at={EVERY: SoftmaxTwice},
    ),
    plant(
        *("softmax_twice_rotary", "attention_weights", "the same in layer 1 of a rotary model"),
        ROTARY,
        at={"blocks.1.attention": SoftmaxTwice},
        layer=1,
    ),
    plant(
        *("softmax_twice_unmasked", "attention_weights", "the second softmax gives masked keys a weight again"),
        at={EVERY: SoftmaxTwiceUnmasked},
        also=("causal_leak",),
    ),
    plant(
        *("weights_squared", "attention_weights", "the attention weights of layer 2 are squared"),
        at={"blocks.2.attention": SquaredWeights},
        layer=2,
    ),
    plant(
        *("weights_squared_normed", "attention_weights", "the weights are squared and divided by their sum"),
        ENCODER,
        at={EVERY: SquaredAndRenormalised},
    ),
    plant(
        *("weights_rooted", "attention_weights", "the square root of the weights multiplies the values"),
        ROTARY,
        at={EVERY: RootedWeights},
    ),
    plant(
        *("merge_without_transpose", "head_layout", "heads are merged without the transpose"),
        at={EVERY: MergeWithoutTranspose},
        also=("causal_leak",),
        catalogue=(14,),
    ),
    plant(
        *("split_without_transpose", "head_layout", "heads of layer 1 are split without the transpose"),
        at={"blocks.1.attention": SplitWithoutTranspose},
        layer=1,
        also=("causal_leak",),
        catalogue=(14,),
    ),
    plant(
        *("tiled_groups", "head_layout", "query head h reads key head h mod G, not h // (H/G)"),
        ROTARY,
        at={EVERY: TiledGroups},
        compared=True,
        catalogue=(56,),
        special="reference",
    ),
)

BUGS = ARITHMETIC
