"""Transformer-XL: scores are q·k with a content bias plus q·r with a position bias, shifted by pad, view and slice."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BUGS = {"heads_not_merged": "head_layout", "no_mask": "causal_leak", "unscaled": "attn_scale"}


def left_of(distance: Tensor) -> Tensor:
    """(B,H,T,T) by distance, T - 1 first -> by key: one column more on the left, read as rows of T."""
    b, h, t, s = distance.shape
    padded = torch.cat([distance.new_zeros(b, h, t, 1), distance], dim=3)
    return padded.view(b, h, s + 1, t)[:, :, 1:].view_as(distance)


def skewed(distance: Tensor) -> Tensor:
    """The same by F.pad and reshape, as relative self-attention for music has it."""
    b, h, t, s = distance.shape
    return F.pad(distance, (1, 0)).reshape(b, h, s + 1, t)[:, :, 1:, :]


class Relative(nn.Module):
    def __init__(self, dim: int, heads: int, bug: str | None, shift):
        super().__init__()
        self.heads, self.bug, self.shift = heads, bug, shift
        self.qkv, self.r = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.content = nn.Parameter(0.02 * torch.randn(heads, dim // heads))
        self.place = nn.Parameter(0.02 * torch.randn(heads, dim // heads))

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1) for part in self.qkv(x).chunk(3, -1))
        r = self.r(waves).view(t, self.heads, -1)
        by_content = torch.einsum("bihd,bjhd->bhij", q + self.content, k)
        by_place = self.shift(torch.einsum("bihd,jhd->bhij", q + self.place, r))
        scores = by_content + by_place
        if self.bug != "unscaled":
            scores = scores * q.shape[-1] ** -0.5
        if self.bug != "no_mask":
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        y = torch.einsum(
            "bhij,bjhd->bihd" if self.bug != "heads_not_merged" else "bhij,bjhd->bhid", scores.softmax(-1), v
        )
        return self.o(y.reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, bug: str | None, shift):
        super().__init__()
        self.attention, self.first, self.second = Relative(dim, heads, bug, shift), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        x = self.first(x + self.attention(x, waves))
        return self.second(x + self.down(F.relu(self.up(x))))


class Xl(nn.Module):
    def __init__(self, bug: str | None = None, shift=left_of, vocab: int = 83, dim: int = 48, heads: int = 4):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.register_buffer("rates", 1 / 10000 ** (torch.arange(0, dim, 2) / dim))
        self.stack = nn.ModuleList(Layer(dim, heads, bug, shift) for _ in range(2))
        self.logits = nn.Linear(dim, vocab)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, data: Tensor) -> Tensor:
        t = data.shape[1]
        angles = torch.outer(torch.arange(t - 1, -1, -1, device=data.device).to(self.rates), self.rates)
        waves, x = torch.cat([angles.sin(), angles.cos()], -1), self.words(data)
        for layer in self.stack:
            x = layer(x, waves)
        return self.logits(x)


def build(bug: str | None = None, shift=left_of) -> Xl:
    torch.manual_seed(2)
    return Xl(bug, shift).eval()
