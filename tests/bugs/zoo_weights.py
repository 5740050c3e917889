"""Bugs of tying, loss, initial weights and gradients."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bugs.base import Attention, Block, Config, make
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import EncoderDecoder
from tests.bugs.bug import plant, spelled_hf
from tests.bugs.zoo_attention import ROTARY

# weight_tying


@torch.no_grad()
def separate_head(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    model.head.weight = nn.Parameter(0.02 * torch.randn(model.tokens.weight.shape, generator=generator))


def copied_head(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())


class CopyUnties(Decoder):
    def __deepcopy__(self, memo):
        new = make(self.cfg)
        new.__class__ = CopyUnties
        new.load_state_dict(self.state_dict())
        copied_head(new)
        return new.train(self.training)


class LoadUnties(Decoder):
    def load_state_dict(self, state_dict, *args, **kwargs):
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self.head.weight = nn.Parameter(state_dict["head.weight"].detach().clone())
        return result


TYING = (
    plant(
        *("head_not_tied_hf", "weight_tying", "another matrix; the config is spelled like Hugging Face's"),
        ROTARY,
        tamper=separate_head,
        dress=spelled_hf,
    ),
    plant(*("head_not_tied", "weight_tying", "tying is declared, the head is another matrix"), tamper=separate_head),
    plant(
        *("head_copied", "weight_tying", "the head starts as a copy of the embedding"),
        ROTARY,
        tamper=copied_head,
        catalogue=(73,),
    ),
    plant(
        *("copy_unties", "weight_tying", "a deep copy is no longer tied"),
        at={"": CopyUnties},
        catalogue=(73,),
        special="deepcopy",
    ),
    plant(
        *("load_unties", "weight_tying", "a loaded model is no longer tied"),
        at={"": LoadUnties},
        catalogue=(73,),
        special="load",
    ),
)


# label_shift, loss_padding


class NotShifted(Decoder):
    def cross_entropy(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class ShiftedTwice(Decoder):
    def cross_entropy(self, logits, labels):
        return super().cross_entropy(logits[:, :-1], labels[:, 1:])


class ShiftedFlat(Decoder):
    def cross_entropy(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1)[:-1], labels.flatten()[1:], ignore_index=-100)


class TargetShiftedTwice(EncoderDecoder):
    def cross_entropy(self, logits, labels):
        return super().cross_entropy(logits[:, :-1], labels[:, 1:])


class PaddingCounted(Decoder):
    def counted(self, labels, attention_mask):
        return labels


class MeanOfMeans(Decoder):
    def cross_entropy(self, logits, labels):
        pairs = zip(logits.split(1), labels.split(1), strict=True)
        return torch.stack([super(MeanOfMeans, self).cross_entropy(x, y) for x, y in pairs]).mean()


class ZeroIgnored(Decoder):
    def cross_entropy(self, logits, labels):
        return super().cross_entropy(logits, labels.masked_fill(labels == 0, -100))


class DividedByAll(Decoder):
    def cross_entropy(self, logits, labels):
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / labels[:, 1:].numel()


LOSSES = (
    plant(*("labels_not_shifted", "label_shift", "each token predicts itself"), at={"": NotShifted}),
    plant(
        *("labels_shifted_twice", "label_shift", "each token predicts the one after the next"),
        ROTARY,
        at={"": ShiftedTwice},
        catalogue=(74,),
    ),
    plant(
        *("labels_shifted_flat", "label_shift", "shifted after flattening: rows run into each other"),
        at={"": ShiftedFlat},
        catalogue=(74,),
    ),
    plant(
        *("target_shifted_twice", "label_shift", "an encoder-decoder shifts its target twice"),
        Config(kind="seq2seq"),
        at={"": TargetShiftedTwice},
        catalogue=(74,),
    ),
    plant(*("padding_counted", "loss_padding", "padding counts in the loss"), at={"": PaddingCounted}, catalogue=(76,)),
    plant(
        *("mean_of_means", "loss_padding", "the mean of the rows' means"), ROTARY, at={"": MeanOfMeans}, catalogue=(75,)
    ),
    plant(
        *("zero_ignored", "loss_padding", "token 0 is taken for padding and never learnt"),
        at={"": ZeroIgnored},
        catalogue=(76, 77),
    ),
    plant(
        *("divided_by_all", "loss_padding", "the sum is divided by all places, padding included"),
        at={"": DividedByAll},
        catalogue=(75,),
    ),
)


# init_loss, dead_gradient


@torch.no_grad()
def loud_embedding(model: nn.Module) -> None:
    model.tokens.weight.mul_(50)


@torch.no_grad()
def loud_head(model: nn.Module) -> None:
    model.head.weight.mul_(50)


class AttentionDetached(Block):
    def forward(self, x, around, cache=None):
        x = x + self.attention(self.norm1(x), around, cache).detach()
        return x + self.mlp(self.norm2(x))


class MLPTimesZero(Block):
    def forward(self, x, around, cache=None):
        x = x + self.attention(self.norm1(x), around, cache)
        return x + 0 * self.mlp(self.norm2(x))


class ValuesAreKeys(Attention):
    def attend(self, q, k, v, allowed, bias):
        return super().attend(q, k, k, allowed, bias)


class ScoresDetached(Attention):
    def score(self, q, k):
        return super().score(q, k).detach()


class Unregistered(Block):
    @property
    def mlp(self):
        return self.held[0]


def unregister(model: nn.Module) -> None:
    block = model.blocks[2]
    block.held = [block._modules.pop("mlp")]
    block.__class__ = Unregistered


LEARNING = (
    plant(
        *("tied_embedding_std_1", "init_loss", "the tied embedding starts at deviation 1"),
        ROTARY,
        tamper=loud_embedding,
        catalogue=(78,),
    ),
    plant(
        *("head_std_1", "init_loss", "the head starts at deviation 1"),
        Config(tie_weights=False),
        tamper=loud_head,
        catalogue=(78,),
    ),
    plant(
        *("attention_detached", "dead_gradient", "attention of layer 1 gets no gradient"),
        at={"blocks.1": AttentionDetached},
        layer=1,
        catalogue=(80,),
    ),
    plant(
        *("mlp_times_zero", "dead_gradient", "the MLP of layer 2 is multiplied by 0"),
        ROTARY,
        at={"blocks.2": MLPTimesZero},
        layer=2,
        also=("norm_placement",),
        catalogue=(80,),
    ),
    plant(
        *("scores_detached", "dead_gradient", "queries and keys of layer 0 get no gradient"),
        ROTARY,
        at={"blocks.0.attention": ScoresDetached},
        layer=0,
    ),
    plant(
        *("values_are_keys", "dead_gradient", "layer 1 reads its values from the keys; v_proj is not used"),
        at={"blocks.1.attention": ValuesAreKeys},
        layer=1,
    ),
    plant(
        *("mlp_unregistered", "dead_gradient", "the MLP of layer 2 sits in a list and is no parameter"),
        tamper=unregister,
        layer=2,
    ),
)

BUGS = TYING + LOSSES + LEARNING
