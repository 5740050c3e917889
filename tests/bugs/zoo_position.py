"""Bugs of positions."""

import torch
import torch.nn.functional as F

from tests.bugs.base import Attention, Config
from tests.bugs.base_decoder import Decoder
from tests.bugs.bug import plant
from tests.bugs.zoo_attention import EVERY, ROTARY

PLAIN_ROTARY = Config(position="rotary")


# position_missing


class NeverAdded(Decoder):
    def place(self, x, positions):
        return x


class ClampedAt64(Decoder):
    def place(self, x, positions):
        return super().place(x, positions.clamp(max=63))


class PlacedByRow(Decoder):
    def place(self, x, positions):
        return super().place(x, torch.arange(x.shape[0])[:, None].expand_as(positions))


class RowSevenIgnored(Decoder):
    def place(self, x, positions):
        return x + F.embedding(positions, self.table.weight, padding_idx=7)


def zero_row(model):
    with torch.no_grad():
        model.table.weight[7] = 0


class NotRotated(Attention):
    def rotate(self, q, k, v, positions):
        return q, k, v


class NoBias(Attention):
    def alibi(self, queries, keys):
        return 0 * super().alibi(queries, keys)


MISSING = (
    plant(
        *("position_never_added", "position_missing", "the table is never added"),
        at={"": NeverAdded},
        also=("dead_gradient",),
    ),
    plant(
        *("position_clamped_at_64", "position_missing", "all places from 63 on share one row"),
        at={"": ClampedAt64},
        also=("dead_gradient",),
        special="long",
    ),
    plant(
        *("position_by_row", "position_missing", "the table is indexed by batch row, not by place"),
        at={"": PlacedByRow},
        also=("batch_variance", "dead_gradient"),
        catalogue=(42,),
    ),
    plant(
        *("position_row_zeroed", "position_missing", "padding_idx keeps row 7 of the table at zero"),
        at={"": RowSevenIgnored},
        tamper=zero_row,
        also=("dead_gradient",),
        catalogue=(43,),
    ),
    plant(
        *("rotary_never_applied", "position_missing", "rotary is declared, nothing is rotated"),
        ROTARY,
        at={EVERY: NotRotated},
    ),
    plant(
        *("alibi_never_added", "position_missing", "ALiBi is declared, the bias is 0"),
        Config(position="alibi"),
        at={EVERY: NoBias},
    ),
)


# position_train_infer


class TrainsOneFurther(Decoder):
    def count_positions(self, cache, real):
        positions = super().count_positions(cache, real)
        return (positions + 1).clamp(max=self.cfg.max_len - 1) if self.training else positions


class StretchedInEval(Attention):
    def angles(self, positions):
        return super().angles(positions) * (1.0 if self.training else 0.5)


class ReadsLast32(Decoder):
    def context(self, row):
        return row[:, -32:]


TRAIN_INFER = (
    plant(
        *("trains_one_further", "position_train_infer", "training counts from 1, inference from 0"),
        at={"": TrainsOneFurther},
        special="train",
    ),
    plant(
        *("stretched_in_eval", "position_train_infer", "angles are halved in evaluation"),
        PLAIN_ROTARY,
        at={EVERY: StretchedInEval},
        also=("rope_relative",),
        warm=6.0,
        special="train",
    ),
    plant(
        *("generates_from_last_32", "position_train_infer", "uncached generation reads the last 32 tokens only"),
        ROTARY,
        at={"": ReadsLast32},
        also=("decode_select",),
        warm=6.0,
        special="long prompt",
    ),
)


# rope_relative, rope_pairing, rope_values


class QueriesOnly(Attention):
    def rotate(self, q, k, v, positions):
        return self.turn(q, self.angles(positions)), k, v


class HalfPrecisionAngles(Attention):
    def angles(self, positions):
        width = self.cfg.d_head
        frequencies = self.cfg.rope_base ** (-torch.arange(0, width, 2) / width)
        return (positions[:, None, :, None].bfloat16() * frequencies.bfloat16()).float()


class OppositeTurns(Attention):
    def rotate(self, q, k, v, positions):
        angles = self.angles(positions)
        return self.turn(q, angles), self.turn(k, -angles), v


class BaseIgnored(Attention):
    def angles(self, positions):
        frequencies = 10000.0 ** (-torch.arange(0, self.cfg.d_head, 2) / self.cfg.d_head)
        return positions[:, None, :, None] * frequencies


class TurnedByHead(Attention):
    def rotate(self, q, k, v, positions):
        angles = self.angles(torch.arange(self.cfg.n_heads)[None])  # (1, 1, H, K/2)
        angles = angles.transpose(1, 2)
        return self.turn(q, angles), self.turn(k, angles), v


class PairsOnHalves(Attention):
    def turn(self, x, angles):
        cos, sin = (wave.to(x.dtype).repeat_interleave(2, -1) for wave in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin


class OtherPairing(Attention):
    def turn(self, x, angles):
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class ValuesTurned(Attention):
    def rotate(self, q, k, v, positions):
        q, k, v = super().rotate(q, k, v, positions)
        return q, k, self.turn(v, self.angles(positions))


ROPE = (
    plant(*("rotates_queries_only", "rope_relative", "keys are not rotated"), PLAIN_ROTARY, at={EVERY: QueriesOnly}),
    plant(
        *("angles_in_bfloat16", "rope_relative", "angles are computed in bfloat16"),
        ROTARY,
        at={EVERY: HalfPrecisionAngles},
        warm=6.0,
        catalogue=(48,),
    ),
    plant(
        *("opposite_turns", "rope_relative", "layer 1 turns keys the other way"),
        ROTARY,
        at={"blocks.1.attention": OppositeTurns},
        layer=1,
    ),
    plant(
        *("base_ignored", "rope_relative", "base 500,000 is declared, 10,000 is used"),
        Config(position="rotary", rope_base=500000.0),
        at={EVERY: BaseIgnored},
        catalogue=(49,),
        special="declared",
        warm=6.0,
    ),
    plant(
        *("turned_by_head", "rope_relative", "the angle goes by the head, not by the place"),
        PLAIN_ROTARY,
        at={EVERY: TurnedByHead},
        also=("position_missing",),
        catalogue=(46,),
        special="no positions",
    ),
    plant(
        *("pairs_on_halves", "rope_pairing", "angles laid out for neighbours, rotation of halves"),
        PLAIN_ROTARY,
        at={EVERY: PairsOnHalves},
        also=("rope_relative",),
        catalogue=(44,),
    ),
    plant(
        *("other_pairing", "rope_pairing", "neighbours are paired, halves are declared"),
        PLAIN_ROTARY,
        at={EVERY: OtherPairing},
        compared=True,
        catalogue=(45,),
        special="reference",
    ),
    plant(
        *("values_turned", "rope_values", "values are rotated too"),
        PLAIN_ROTARY,
        at={EVERY: ValuesTurned},
        catalogue=(47,),
    ),
    plant(
        *("values_turned_one_layer", "rope_values", "values of layer 2 are rotated too"),
        ROTARY,
        at={"blocks.2.attention": ValuesTurned},
        layer=2,
        also=("rope_relative",),
        catalogue=(47,),
    ),
)

BUGS = MISSING + TRAIN_INFER + ROPE
