"""A sliding window whose cache is a ring of as many slots; a prompt is fed to it token by token."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS, WINDOW = 61, 32, 4, 2, 8
SIZE = WIDTH // HEADS
BUGS = {"slot": ("window", "cache_mismatch"), "position": ("decode_position",)}


class Ring:
    """Slots of keys and values per layer; slot i holds the latest position that is i modulo their number."""

    def __init__(self) -> None:
        self.length = 0
        self.slots: list[tuple[Tensor, Tensor] | None] = [None] * LAYERS

    def put(self, layer: int, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
        empty = k.new_zeros(len(k), HEADS, WINDOW, SIZE)
        keys, values = (t.clone() for t in self.slots[layer] or (empty, empty))
        at = self.length % number
        keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
        self.slots[layer] = keys, values
        filled = min(self.length + 1, WINDOW)
        return keys[:, :, :filled], values[:, :, :filled]


class Model(nn.Module):
    def __init__(self, bug: str | None = None):
        super().__init__()
        self.bug, self.config = bug, SimpleNamespace(vocab_size=VOCAB, sliding_window=WINDOW, n_layers=LAYERS)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2 * LAYERS + 1))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(LAYERS))
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(64, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / 10000 ** (torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        return x * cos + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * sin

    def new_cache(self) -> Ring:
        return Ring()

    def forward(self, tokens: Tensor, cache: Ring | None = None):
        if cache is not None and tokens.shape[1] > 1:
            return torch.cat([self(one, cache)[0] for one in tokens.split(1, 1)], 1), cache
        batch, time = tokens.shape
        past = 0 if cache is None or self.bug == "position" else cache.length
        positions, x = torch.arange(past, past + time), self.table(tokens)
        for i in range(LAYERS):
            q, k, v = self.mixes[i](self.norms[2 * i](x)).view(batch, time, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            q, k = self.rotated(q, positions), self.rotated(k, positions)
            if cache is None:
                distance = positions[:, None] - positions
                mixed = F.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < WINDOW))
            else:
                k, v = cache.put(i, k, v, WINDOW - (self.bug == "slot"))
                mixed = F.scaled_dot_product_attention(q, k, v)
            x = x + self.outs[i](mixed.transpose(1, 2).reshape(batch, time, WIDTH))
            x = x + self.downs[i](F.gelu(self.ups[i](self.norms[2 * i + 1](x))))
        logits = self.head(self.norms[-1](x))
        if cache is None:
            return logits
        cache.length += 1
        return logits, cache


def build(bug: str | None = None) -> Model:
    torch.manual_seed(3)
    return Model(bug).eval()
