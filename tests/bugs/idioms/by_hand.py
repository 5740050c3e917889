"""Softmax, norm and rotation written out: exp and a sum, a class `Norm`, sines and cosines by hand."""

import torch
from torch import Tensor, nn

VOCAB, DIM, HEADS = 89, 48, 4


def by_logsumexp(s: Tensor, hidden: Tensor) -> Tensor:
    s = s.masked_fill(hidden, float("-inf"))
    return torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True))


def by_log_softmax(s: Tensor, hidden: Tensor) -> Tensor:
    return torch.log_softmax(s.masked_fill(hidden, torch.finfo(s.dtype).min), dim=-1).exp()


def by_largest(s: Tensor, hidden: Tensor) -> Tensor:
    s = s.masked_fill(hidden, float("-inf"))
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def masked_late(s: Tensor, hidden: Tensor) -> Tensor:
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values) * (~hidden).to(s.dtype)
    return e / e.sum(dim=-1, keepdim=True)


def over_queries(s: Tensor, hidden: Tensor) -> Tensor:
    s = s.masked_fill(hidden, float("-inf"))
    return torch.exp(s - torch.logsumexp(s, dim=-2, keepdim=True))


SOFTMAXES = {f.__name__: f for f in (by_logsumexp, by_log_softmax, by_largest, masked_late)}
BUGS = {
    "unscaled": "attn_scale",
    "over_queries": "softmax_axis",
    "squared": "attention_weights",
    "strict": "over_mask",
    "eps_of_its_own": "norm_eps",
    "no_last_norm": "norm_placement",
    "keys_not_rotated": "rope_relative",
    "queries_not_rotated": "rope_relative",
}


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float, used: float):
        super().__init__()
        self.scale, self.variance_epsilon, self.used = nn.Parameter(torch.ones(dim)), eps, used

    def forward(self, h: Tensor) -> Tensor:
        h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + self.used)
        return self.scale * h


class Turn(nn.Module):
    """Rotary positions; `adjacent` pairs 2i with 2i + 1, else i with i + d/2."""

    def __init__(self, width: int, adjacent: bool):
        super().__init__()
        self.adjacent = adjacent
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], device=x.device).to(self.rates)[:, None] * self.rates
        cos, sin = angles.cos(), angles.sin()
        if self.adjacent:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, bug: str | None, softmax, adjacent: bool):
        super().__init__()
        self.bug, self.softmax = bug, over_queries if bug == "over_queries" else softmax
        used = 1e-3 if bug == "eps_of_its_own" else 1e-6
        self.n1, self.n2, self.turn = Norm(DIM, 1e-6, used), Norm(DIM, 1e-6, used), Turn(DIM // HEADS, adjacent)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(DIM, 96), nn.Linear(DIM, 96), nn.Linear(96, DIM)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q = q if self.bug == "queries_not_rotated" else self.turn(q)
        k = k if self.bug == "keys_not_rotated" else self.turn(k)
        s = q @ k.mT if self.bug == "unscaled" else q @ k.mT / q.shape[-1] ** 0.5
        t = x.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        if self.bug == "strict":
            hidden = hidden | (torch.arange(t, device=x.device)[:, None] > 2) & torch.eye(t, dtype=torch.bool)
        p = self.softmax(s, hidden)
        p = p * p if self.bug == "squared" else p
        return self.wo((p @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.n1(x))
        h = self.n2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class ByHand(nn.Module):
    def __init__(self, bug: str | None, softmax, adjacent: bool):
        super().__init__()
        self.bug, self.words = bug, nn.Embedding(VOCAB, DIM)
        self.blocks, self.last = nn.ModuleList(Block(bug, softmax, adjacent) for _ in range(2)), Norm(DIM, 1e-6, 1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.bug == "no_last_norm" else self.last(x))


def build(bug: str | None = None, softmax=by_logsumexp, adjacent: bool = False) -> ByHand:
    torch.manual_seed(7)
    return ByHand(bug, softmax, adjacent).eval()
