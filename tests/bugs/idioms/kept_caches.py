"""Decoders that keep keys and values in their modules: made by a method, or collected while a flag is set."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, LIMIT = 67, 32, 4, 96


class Mixer(nn.Module):
    """Attention whose subclass says which keys and values there are."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = (self.q(x), *self.kv(x).chunk(2, -1))
        return tuple(p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)

    def join(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2))


class Slots(nn.Module):
    """Buffers of a fixed size, written at the positions of the new tokens."""

    def __init__(self, rows: int, length: int, dtype: torch.dtype):
        super().__init__()
        shape = (rows, HEADS, length, DIM // HEADS)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v", torch.zeros(shape, dtype=dtype), persistent=False)


class Placed(Mixer):
    """Writes to the slots where `at` is given; without it, a plain causal attention."""

    def __init__(self, bug: str | None):
        super().__init__()
        self.slots, self.bug = None, bug

    def forward(self, x: Tensor, at: Tensor | None) -> Tensor:
        q, k, v = self.split(x)
        if at is None or self.slots is None:
            t = x.shape[1]
            return self.join(q, k, v, torch.ones(t, t, dtype=torch.bool, device=x.device).tril())
        first = at if self.bug != "one_early" else (at - 1).clamp(min=0)
        self.slots.k[:, :, first] = k.detach()
        self.slots.v[:, :, at] = v.detach()
        visible = torch.arange(self.slots.k.shape[2], device=x.device)[None] <= at[:, None]
        return self.join(q, self.slots.k, self.slots.v, visible)


class Collected(Mixer):
    """Appends to what it has while the flag is set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache_k", None, persistent=False)
        self.register_buffer("cache_v", None, persistent=False)

    def forward(self, x: Tensor, use_cache: bool) -> Tensor:
        q, k, v = self.split(x)
        if use_cache:
            if self.cache_k is not None:
                k, v = torch.cat([self.cache_k, k], 2), torch.cat([self.cache_v, v], 2)
            self.cache_k, self.cache_v = k.detach(), v.detach()
        t, s = q.shape[2], k.shape[2]
        return self.join(q, k, v, torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t))


class Layer(nn.Module):
    def __init__(self, mixer: Mixer):
        super().__init__()
        self.mixer, self.first, self.second = mixer, nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x: Tensor, how) -> Tensor:
        x = x + self.mixer(self.first(x), how)
        return x + self.feed(self.second(x))


class Decoder(nn.Module):
    def __init__(self, mixers):
        super().__init__()
        self.words, self.spots = nn.Embedding(VOCAB, DIM), nn.Embedding(LIMIT, DIM)
        self.layers, self.end = nn.ModuleList(Layer(m) for m in mixers), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.05)

    def run(self, tokens: Tensor, at: Tensor, how) -> Tensor:
        x = self.words(tokens) + self.spots(at)
        for layer in self.layers:
            x = layer(x, how)
        return self.head(self.end(x))


class SetUp(Decoder):
    """`setup_caches(rows, length)`, then `input_pos`; a plain call works before and after it."""

    BUGS: ClassVar = {"one_early": "cache_mismatch", "restarts": "decode_position"}

    def __init__(self, bug: str | None = None):
        super().__init__([Placed(bug) for _ in range(2)])
        self.bug = bug

    def setup_caches(self, max_batch_size: int, max_seq_len: int):
        for layer in self.layers:
            layer.mixer.slots = Slots(max_batch_size, max_seq_len, self.head.weight.dtype)

    def forward(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device) if input_pos is None else input_pos
        return self.run(tokens, at * 0 if self.bug == "restarts" and len(at) == 1 else at, input_pos)


class Always(SetUp):
    """After `setup_caches` every call reads and writes the slots, as the caller wanted; `reset_caches` removes them."""

    def forward(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device) if input_pos is None else input_pos
        return self.run(tokens, at * 0 if self.bug == "restarts" and len(at) == 1 else at, at)


class OwnLimit(SetUp):
    """`setup_caches` takes the length from the model unless it is given, and then positions (B,T) are required."""

    def __init__(self, bug: str | None = None):
        super().__init__(bug)
        self.max_seq_len = LIMIT

    def setup_caches(self, batch_size: int, dtype: torch.dtype, *, decoder_max_seq_len: int | None = None):
        for layer in self.layers:
            layer.mixer.slots = Slots(batch_size, decoder_max_seq_len or self.max_seq_len, dtype)

    def forward(self, tokens: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        if self.layers[0].mixer.slots is not None and (input_pos is None or input_pos.dim() != 2):
            raise ValueError("with caches, positions (B,T) are needed")
        return super().forward(tokens, None if input_pos is None else input_pos[0])


class Flagged(Decoder):
    """`use_cache=True` continues the sequence, `reset_kv_cache()` ends it."""

    BUGS: ClassVar = {"stays": "state_leak", "restarts": "decode_position", "generate_keeps": "state_leak"}

    def __init__(self, bug: str | None = None):
        super().__init__([Collected() for _ in range(2)])
        self.bug, self.seen = bug, 0

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        if self.bug != "generate_keeps" or self.seen + idx.shape[1] + max_new_tokens > LIMIT:
            self.reset_kv_cache()
        new = idx
        for _ in range(max_new_tokens):
            new = self(new, use_cache=True)[:, -1:].argmax(-1)
            idx = torch.cat([idx, new], 1)
        return idx

    def reset_kv_cache(self):
        for layer in self.layers:
            layer.mixer.cache_k = layer.mixer.cache_v = None
        if self.bug != "stays":
            self.seen = 0

    def forward(self, idx: Tensor, use_cache: bool = False) -> Tensor:
        start = self.seen if use_cache and self.bug != "restarts" else 0
        self.seen += idx.shape[1] if use_cache else 0
        at = torch.arange(start, start + idx.shape[1], device=idx.device)
        return self.run(idx, at % LIMIT if self.bug == "stays" else at, use_cache)


MODELS = (SetUp, Always, OwnLimit, Flagged)


def build(cls, bug: str | None = None):
    torch.manual_seed(3)
    return cls(bug).eval()


def flagged(bug: str | None = None) -> Flagged:
    return build(Flagged, bug)


def set_up(bug: str | None = None) -> SetUp:
    return build(SetUp, bug)
