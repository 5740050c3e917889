"""Bugs of the cache: what it holds, where it puts tokens, how it is masked, cropped and reordered."""

import torch

from tests.bugs.base import Attention, Cache, Config
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import EncoderDecoder
from tests.bugs.bug import plant
from tests.bugs.zoo_attention import EVERY, ROTARY, WINDOWED, ones

# cache_mismatch


class NeverGrows(Cache):
    def note(self, real, positions):
        if len(self) == 0:
            super().note(real, positions)
            self.prompt = self.real, self.positions
        else:
            self.real = torch.cat([self.prompt[0], real], 1)
            self.positions = torch.cat([self.prompt[1], positions], 1)
            self.count()

    def extend(self, layer, k, v):
        if self.keys[layer] is None:
            return super().extend(layer, k, v)
        return torch.cat([self.keys[layer], k], 2), torch.cat([self.values[layer], v], 2)


class FirstRowForAll(Cache):
    def extend(self, layer, k, v):
        k, v = super().extend(layer, k, v)
        self.keys[layer] = k[:1].expand_as(k)
        return k, v


class Keeps64(Cache):
    def note(self, real, positions):
        if len(self):
            self.real, self.positions = self.real[:, -64:], self.positions[:, -64:]
        super().note(real, positions)

    def extend(self, layer, k, v):
        if self.keys[layer] is not None:
            self.keys[layer], self.values[layer] = self.keys[layer][:, :, -64:], self.values[layer][:, :, -64:]
        return super().extend(layer, k, v)


class HalfPrecision(Cache):
    def extend(self, layer, k, v):
        exact = k.dtype
        if self.keys[layer] is not None:
            past_k, past_v = self.keys[layer].to(exact), self.values[layer].to(exact)
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        self.keys[layer], self.values[layer] = k.to(torch.bfloat16), v.to(torch.bfloat16)
        return k, v


class OtherLayersValues(Cache):
    def extend(self, layer, k, v):
        if layer == 2 and self.values[2] is not None:
            self.values[2] = self.values[1][:, :, : self.values[2].shape[2]]
        return super().extend(layer, k, v)


MISMATCHES = (
    plant(
        *("target_cache_never_grows", "cache_mismatch", "an encoder-decoder does not store decoded tokens"),
        Config(kind="seq2seq", position="rotary"),
        cache=NeverGrows,
        catalogue=(18,),
    ),
    plant(*("cache_never_grows", "cache_mismatch", "decoded tokens are not stored"), cache=NeverGrows),
    plant(
        *("cache_first_row", "cache_mismatch", "stored keys of every row are those of row 0"),
        ROTARY,
        cache=FirstRowForAll,
        catalogue=(23,),
        also=("batch_variance", "cache_reorder"),
        special="batch",
    ),
    plant(
        *("cache_keeps_64", "cache_mismatch", "the cache silently forgets all but the last 64 tokens"),
        ROTARY,
        cache=Keeps64,
        special="long",
    ),
    plant(*("cache_half_precision", "cache_mismatch", "keys and values are stored in bfloat16"), cache=HalfPrecision),
    plant(
        *("cache_other_layers_values", "cache_mismatch", "layer 2 reads the cached values of layer 1"),
        cache=OtherLayersValues,
        layer=2,
    ),
    plant(
        *("target_other_layers_values", "cache_mismatch", "the same in the decoder of an encoder-decoder"),
        Config(kind="seq2seq"),
        cache=OtherLayersValues,
        layer=2,
    ),
)


# decode_position


class RestartsAtZero(Decoder):
    def count_positions(self, cache, real):
        return (real.long().cumsum(1) - 1).clamp(min=0)


class OffByOneWhenCached(Decoder):
    def count_positions(self, cache, real):
        return super().count_positions(cache, real) + (1 if len(cache) else 0)


class PromptCountedTwice(Decoder):
    def count_positions(self, cache, real):
        if len(cache) == 0:
            cache.prompt = 0
        elif cache.prompt == 0:
            cache.prompt = len(cache)
            return super().count_positions(cache, real) + cache.prompt
        return super().count_positions(cache, real)


class QueryOffsetMissing(Attention):
    def forward(self, x, around, cache=None):
        self.past = 0 if cache is None else around.allowed.shape[-1] - x.shape[1]
        return super().forward(x, around, cache)

    def rotate(self, q, k, v, positions):
        return self.turn(q, self.angles(positions - self.past)), self.turn(k, self.angles(positions)), v


class NoPlaceForOne(Decoder):
    def place(self, x, positions):
        return x if x.shape[1] == 1 else super().place(x, positions)


class BiasOfNewTokensOnly(Attention):
    def alibi(self, queries, keys):
        bias = super().alibi(queries, keys)
        bias[..., : keys.shape[1] - queries.shape[1]] = 0
        return bias


class BiasOfFirstRows(Attention):
    def alibi(self, queries, keys):
        return super().alibi(keys[:, : queries.shape[1]], keys)


class OffsetIsHeads(Decoder):
    def count_positions(self, cache, real):
        ahead = real.long().cumsum(1) - 1
        return (ahead + (self.cfg.n_heads if len(cache) else 0)).clamp(min=0)


class PairRestarts(EncoderDecoder):
    def count_positions(self, cache, real):
        return (real.long().cumsum(1) - 1).clamp(min=0)


PAIR = Config(kind="seq2seq")
ALIBI = Config(position="alibi")
DECODE_POSITIONS = (
    plant(
        *("offset_is_heads", "decode_position", "the offset is the number of heads, read off the wrong axis"),
        at={"": OffsetIsHeads},
        also=("cache_mismatch",),
        catalogue=(38,),
    ),
    plant(
        *("target_position_restarts", "decode_position", "target tokens after the first call get position 0"),
        PAIR,
        at={"": PairRestarts},
        also=("cache_mismatch",),
    ),
    plant(
        *("position_restarts", "decode_position", "new tokens get position 0"), at={"": RestartsAtZero}, catalogue=(20,)
    ),
    plant(
        *("rope_off_by_one_when_cached", "decode_position", "cached tokens stand one place too far"),
        ROTARY,
        at={"": OffByOneWhenCached},
        also=("cache_mismatch",),
        warm=6.0,
    ),
    plant(
        *("prompt_counted_twice", "decode_position", "the offset advances by the prompt twice"),
        ROTARY,
        at={"": PromptCountedTwice},
        also=("cache_mismatch",),
        warm=6.0,
        catalogue=(22,),
    ),
    plant(
        *("query_offset_missing", "decode_position", "cached queries are rotated as if nothing was before them"),
        ROTARY,
        at={EVERY: QueryOffsetMissing},
        also=("cache_mismatch",),
        warm=6.0,
        catalogue=(21,),
    ),
    plant(
        *("no_place_for_one", "decode_position", "a single token gets no position at all"),
        Config(position="sinusoidal"),
        at={"": NoPlaceForOne},
        also=("cache_mismatch",),
        catalogue=(20,),
    ),
    plant(
        *("alibi_bias_zero", "decode_position", "the bias of cached keys is 0"),
        ALIBI,
        at={EVERY: BiasOfNewTokensOnly},
        also=("cache_mismatch",),
        catalogue=(24,),
    ),
    plant(
        *("alibi_first_rows", "decode_position", "the bias rows are the first, not the last"),
        ALIBI,
        at={EVERY: BiasOfFirstRows},
        also=("cache_mismatch",),
        catalogue=(25, 26),
    ),
)


# cache_mask


class NoMaskWithCache(Decoder):
    def forward(self, idx, attention_mask=None, positions=None, cache=None):
        self.caching = cache is not None
        return super().forward(idx, attention_mask, positions, cache)

    def pattern(self, queries, keys):
        return ones(queries, keys) if self.caching else super().pattern(queries, keys)


class TopLeft(Decoder):
    def visible(self, cache, new):
        if new == len(cache):
            return super().visible(cache, new)
        square = torch.arange(len(cache))[None, :] <= torch.arange(new)[:, None]
        return square[None, None] & cache.real[:, None, None, :]


class ChunkSeesItself(Decoder):
    def pattern(self, queries, keys):
        later_chunk = 1 < len(queries) < len(keys)
        return ones(queries, keys) if later_chunk else super().pattern(queries, keys)


class OffsetEndsAt64(Decoder):
    def pattern(self, queries, keys):
        past = len(keys) - len(queries)
        return (
            super().pattern(queries - past + min(past, 64), keys)
            if len(queries) > 1
            else super().pattern(queries, keys)
        )


class LocalWindow(Decoder):
    def within(self, queries, keys):
        later_chunk = 1 < len(queries) < len(keys)
        return super().within(queries - queries[0] if later_chunk else queries, keys)


CACHE_MASKS = (
    plant(
        *("no_mask_with_cache", "cache_mask", "the causal mask is skipped whenever a cache is passed"),
        at={"": NoMaskWithCache},
        also=("causal_leak",),
        catalogue=(15,),
    ),
    plant(
        *("mask_top_left", "cache_mask", "the triangle starts at the first key"), at={"": TopLeft}, catalogue=(16, 17)
    ),
    plant(
        *("chunk_sees_itself", "cache_mask", "a later chunk of several tokens has no mask"),
        ROTARY,
        at={"": ChunkSeesItself},
        catalogue=(17, 27),
        special="chunk",
    ),
    plant(
        *("mask_offset_ends_at_64", "cache_mask", "the mask's offset stops growing at 64 cached tokens"),
        at={"": OffsetEndsAt64},
        catalogue=(11,),
        special="long",
    ),
    plant(
        *("window_of_the_chunk", "cache_mask", "a later chunk builds its window from its own indices"),
        WINDOWED,
        at={"": LocalWindow},
        also=("window",),
        catalogue=(32,),
        special="chunk",
    ),
)


# cache_rollback, cache_reorder


class PositionNotRewound(Cache):
    def crop(self, n):
        seen = self.seen
        super().crop(n)
        self.seen = seen


class KeepsTheTail(Cache):
    def crop_tensors(self, n):
        tail = self.values[1][:, :, self.values[1].shape[2] - n :]
        super().crop_tensors(n)
        self.values[1] = tail


class CropResets(Cache):
    def crop(self, n):
        super().crop(0)


class CropOneTooFew(Cache):
    def crop(self, n):
        super().crop(min(n + 1, len(self)))


class NotReordered(Cache):
    def reorder(self, rows):
        pass


class ValuesNotReordered(Cache):
    def reorder_tensors(self, rows):
        values = self.values
        super().reorder_tensors(rows)
        self.values = values


class OneLayerNotReordered(Cache):
    def reorder_tensors(self, rows):
        kept = self.keys[2], self.values[2]
        super().reorder_tensors(rows)
        self.keys[2], self.values[2] = kept


class PaddingNotReordered(Cache):
    def reorder_tokens(self, rows):
        real = self.real
        super().reorder_tokens(rows)
        self.real = real


class CrossNotReordered(Cache):
    def reorder_tensors(self, rows):
        cross = self.cross
        super().reorder_tensors(rows)
        self.cross = cross


ROLLBACKS = (
    plant(*("crop_keeps_position", "cache_rollback", "crop does not rewind the position"), cache=PositionNotRewound),
    plant(
        *("crop_keeps_the_tail", "cache_rollback", "crop keeps the last values of layer 1, not the first"),
        ROTARY,
        cache=KeepsTheTail,
        layer=1,
        catalogue=(33,),
    ),
    plant(*("crop_resets", "cache_rollback", "crop empties the cache"), cache=CropResets, catalogue=(34,)),
    plant(*("crop_one_too_few", "cache_rollback", "crop leaves one token too many"), ROTARY, cache=CropOneTooFew),
    plant(*("reorder_does_nothing", "cache_reorder", "reorder does nothing"), cache=NotReordered, catalogue=(36,)),
    plant(*("reorder_keys_only", "cache_reorder", "values stay where they were"), ROTARY, cache=ValuesNotReordered),
    plant(
        *("reorder_skips_a_layer", "cache_reorder", "layer 2 is not permuted"),
        cache=OneLayerNotReordered,
        layer=2,
        catalogue=(36,),
    ),
    plant(
        *("reorder_leaves_padding", "cache_reorder", "the padding mask stays where it was"),
        ROTARY,
        cache=PaddingNotReordered,
        special="padding",
    ),
    plant(
        *("reorder_leaves_the_source", "cache_reorder", "keys of the source stay where they were"),
        Config(kind="seq2seq"),
        cache=CrossNotReordered,
    ),
)

BUGS = MISMATCHES + DECODE_POSITIONS + CACHE_MASKS + ROLLBACKS
