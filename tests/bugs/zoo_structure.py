"""Bugs of how a model is put together: layers used twice, positions added twice, dtypes, constant logits, tables."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bugs.base import Attention, Block, Config
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import Encoder, EncoderDecoder
from tests.bugs.bug import plant
from tests.bugs.zoo_attention import ENCODER, EVERY, ROTARY

PAIR = Config(kind="seq2seq")

# layer_reuse


def one_block(model: nn.Module) -> None:
    """`[Block()] * n`."""
    model.blocks = nn.ModuleList([model.blocks[0]] * len(model.blocks))


def one_mlp(model: nn.Module) -> None:
    model.blocks[2].mlp = model.blocks[1].mlp


class RunsTwice(Block):
    def forward(self, x, around, cache=None):
        return super().forward(super().forward(x, around, cache), around, cache)


class RunsTwiceUncached(Block):
    def forward(self, x, around, cache=None):
        x = super().forward(x, around, cache)
        return x if cache is not None else super().forward(x, around, cache)


REUSE = (
    plant(*("layers_multiplied", "layer_reuse", "one block object stands for all layers"), tamper=one_block),
    plant(*("mlp_shared", "layer_reuse", "layer 2 has the MLP of layer 1"), ROTARY, tamper=one_mlp, layer=2),
    plant(*("layer_twice", "layer_reuse", "layer 1 runs twice"), ROTARY, at={"blocks.1": RunsTwice}, layer=1),
    plant(
        *("layer_twice_uncached", "layer_reuse", "layer 1 runs twice, once with a cache"),
        at={"blocks.1": RunsTwiceUncached},
        layer=1,
    ),
)


# position_twice


class PlacedTwice(Decoder):
    def place(self, x, positions):
        return super().place(super().place(x, positions), positions)


class EncoderPlacedTwice(Encoder):
    def embed(self, idx, positions):
        return self.place(super().embed(idx, positions), positions)


POSITIONS = (
    plant(*("position_twice", "position_twice", "the learned table is added twice"), at={"": PlacedTwice}),
    plant(
        *("position_twice_sinusoidal", "position_twice", "sinusoids are added twice in an encoder"),
        Config(kind="encoder", position="sinusoidal"),
        at={"": EncoderPlacedTwice},
    ),
)


# low_precision, constant_logits


class HalfSoftmax(Attention):
    def normalise(self, scores):
        return torch.softmax(scores.half(), dim=-1).to(scores.dtype)


class BrainSoftmax(Attention):
    def normalise(self, scores):
        return torch.softmax(scores, dim=-1, dtype=torch.bfloat16).to(scores.dtype)


class ConstantHead(nn.Linear):
    def forward(self, x):
        return self.weight.sum(1).expand(*x.shape[:-1], -1)


PRECISION = (
    plant(
        *("half_softmax", "low_precision", "softmax of layer 1 runs in float16"),
        at={"blocks.1.attention": HalfSoftmax},
        layer=1,
        warm=6.0,
    ),
    plant(
        *("bfloat16_softmax", "low_precision", "softmax runs in bfloat16"),
        ENCODER,
        at={EVERY: BrainSoftmax},
        warm=6.0,
    ),
    plant(
        *("constant_head", "constant_logits", "the head ignores what it is given"),
        ROTARY,
        at={"head": ConstantHead},
    ),
)


# weight_tying, loss_padding, init_loss


class SourceTable(EncoderDecoder):
    def encode(self, src, src_mask=None):
        kept, self.tokens = self.tokens, self.source_tokens
        try:
            return super().encode(src, src_mask)
        finally:
            self.tokens = kept


def own_source_table(model: nn.Module) -> None:
    model.source_tokens = nn.Embedding.from_pretrained(model.tokens.weight.detach().roll(1, 0), freeze=False)
    model.__class__ = SourceTable


class EndIgnored(Decoder):
    def cross_entropy(self, logits, labels):
        return super().cross_entropy(logits, labels.masked_fill(labels == 5, -100))


class PaddingLabels(Encoder):
    def loss(self, idx, labels, attention_mask=None):
        return F.cross_entropy(self(idx, attention_mask).flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def larger_head(model: nn.Module) -> None:
    model.head.weight.mul_(3)


DECLARED = (
    plant(
        *("source_table", "weight_tying", "tying is declared, the source has its own table"),
        PAIR,
        tamper=own_source_table,
        special="source",
    ),
    plant(
        *("end_ignored", "loss_padding", "the end of text, id 5, does not count"),
        at={"": EndIgnored},
        catalogue=(77,),
        expect={"eos_token_id": 5},
    ),
    plant(*("padding_labels", "loss_padding", "an encoder counts labels at padding"), ENCODER, at={"": PaddingLabels}),
    plant(
        *("head_three_times", "init_loss", "the head starts at three times the declared deviation"),
        Config(tie_weights=False),
        tamper=larger_head,
        special="declared",
    ),
)

BUGS = REUSE + POSITIONS + PRECISION + DECLARED
