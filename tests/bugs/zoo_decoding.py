"""Bugs of generation, and state that outlives a call."""

import torch

from tests.bugs.base import Attention, Config, LayerNorm
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import EncoderDecoder
from tests.bugs.bug import plant
from tests.bugs.zoo_attention import EVERY, ROTARY

# decode_select, state_leak


class SecondLast(Decoder):
    def choose(self, logits, real):
        return super().choose(logits[:, :-1], real[:, :-1]) if logits.shape[1] > 1 else super().choose(logits, real)


class ShortestRow(Decoder):
    def choose(self, logits, real):
        return logits[:, real.sum(1).amin() - 1].argmax(-1, keepdim=True)


class AcceptsOneMore(Decoder):
    def agreement(self, best, proposal):
        return min(super().agreement(best, proposal) + 1, proposal.shape[1])


class SharedCache(Decoder):
    held = None

    def new_cache(self):
        if self.held is None:
            self.held = super().new_cache()
        return self.held


class DynamicBase(Attention):
    longest = 0

    def angles(self, positions):
        self.longest = max(self.longest, int(positions.max()) + 1)
        stretch = max(self.longest / 64, 1.0) ** (self.cfg.d_head / (self.cfg.d_head - 2))
        width = self.cfg.d_head
        frequencies = (self.cfg.rope_base * stretch) ** (-torch.arange(0, width, 2) / width)
        return positions[:, None, :, None] * frequencies


class RunningMean(LayerNorm):
    mean = 0.0

    def forward(self, x):
        out = super().forward(x - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        return out


class KeepsTheSource(EncoderDecoder):
    kept = None

    def encode(self, src, src_mask=None):
        if self.kept is None or self.kept.shape[:2] != src.shape:
            self.kept = super().encode(src, src_mask).detach()
        return self.kept


DECODING = (
    plant(*("picks_second_last", "decode_select", "generate reads the logits before the last"), at={"": SecondLast}),
    plant(
        *("picks_end_of_shortest", "decode_select", "generate reads every row where the shortest one ends"),
        ROTARY,
        at={"": ShortestRow},
        also=("pad_leak",),
        special="right padding",
    ),
    plant(
        *("accepts_one_more", "decode_select", "speculative decoding keeps the first rejected token"),
        ROTARY,
        at={"": AcceptsOneMore},
        catalogue=(35,),
        special="draft",
        warm=6.0,
    ),
    plant(
        *("shared_cache", "state_leak", "one cache object is handed out for every request"),
        at={"": SharedCache},
        catalogue=(12, 37),
        also=("cache_mismatch",),
    ),
    plant(
        *("dynamic_base", "state_leak", "the rotary base depends on the longest input so far"),
        ROTARY,
        at={EVERY: DynamicBase},
        also=("cache_mismatch",),
        catalogue=(28, 29),
        warm=6.0,
        special="long",
    ),
    plant(
        *("running_mean", "state_leak", "a norm of layer 1 subtracts a mean of earlier calls"),
        at={"blocks.1.norm2": RunningMean},
        layer=1,
    ),
    plant(
        *("keeps_the_source", "state_leak", "a new source of the same shape is answered with the old one"),
        Config(kind="seq2seq"),
        at={"": KeepsTheSource},
    ),
)

BUGS = DECODING
