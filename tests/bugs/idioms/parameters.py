"""A decoder of one ParameterDict and functions: no layer is a module, and heads are an axis of the weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, LAYERS = 79, 40, 5, 2
BUGS = {
    "squared": "attention_weights",
    "twice": "attention_weights",
    "no_last_norm": "norm_placement",
    "unscaled": "attn_scale",
    "keys_not_rotated": "rope_relative",
    "labels_not_shifted": "label_shift",
}
ORDERS = {"bhts": "bhtk", "hbts": "hbtk", "bths": "bthk"}
"""Layout of the scores -> layout of queries."""


def turned(x: Tensor, axis: int) -> Tensor:
    """Rotate component i with i + K/2 by the position along an axis."""
    half = x.shape[-1] // 2
    rates = 500.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[axis], device=x.device, dtype=x.dtype)[:, None] * rates
    shape = [1] * x.dim()
    shape[axis], shape[-1] = x.shape[axis], half
    cos, sin = angle.cos().view(shape), angle.sin().view(shape)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Bare(nn.Module):
    def __init__(self, bug: str | None, scores: str):
        super().__init__()
        self.bug, self.scores = bug, scores
        w = {"table": torch.randn(VOCAB, DIM), "head": torch.randn(DIM, VOCAB)}
        for i in range(LAYERS):
            w |= {f"{n}{i}": torch.randn(HEADS, DIM, DIM // HEADS) for n in ("q", "k", "v")}
            w |= {f"o{i}": torch.randn(HEADS, DIM // HEADS, DIM), f"a{i}": torch.randn(DIM, 96)}
            w |= {f"b{i}": torch.randn(96, DIM)}
        gains = [f"g{i}{j}" for i in range(LAYERS) for j in (0, 1)] + ["gain_end"]
        self.w = nn.ParameterDict({k: 0.06 * v for k, v in w.items()} | {g: torch.ones(DIM) for g in gains})

    def normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (DIM,), self.w[name], 1e-6)

    def attend(self, x: Tensor, i: int) -> Tensor:
        out, w = ORDERS[self.scores], self.w
        q, k, v = (torch.einsum(f"btd,hdk->{out}", x, w[f"{n}{i}"]) for n in ("q", "k", "v"))
        time = out.index("t")
        q, k = turned(q, time), k if self.bug == "keys_not_rotated" else turned(k, time)
        s = torch.einsum(f"{out},{out.replace('t', 's')}->{self.scores}", q, k)
        s = s if self.bug == "unscaled" else s / q.shape[-1] ** 0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        hidden = hidden[:, None] if self.scores == "bths" else hidden
        p = s.masked_fill(hidden, float("-inf")).softmax(-1)
        if self.bug == "squared":
            p = p * p
        if self.bug == "twice":
            p = p.softmax(-1)
        y = torch.einsum(f"{self.scores},{out.replace('t', 's')}->bthk", p, v)
        return torch.einsum("bthk,hkd->btd", y, w[f"o{i}"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.w["table"][ids]
        for i in range(LAYERS):
            x = x + self.attend(self.normed(x, f"g{i}0"), i)
            x = x + F.gelu(self.normed(x, f"g{i}1") @ self.w[f"a{i}"]) @ self.w[f"b{i}"]
        x = x if self.bug == "no_last_norm" else self.normed(x, "gain_end")
        return x @ self.w["head"]

    def loss(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self(ids)
        if labels is None or self.bug != "labels_not_shifted":
            logits, labels = logits[:, :-1], (ids if labels is None else labels)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(bug: str | None = None, scores: str = "bhts") -> Bare:
    torch.manual_seed(13)
    return Bare(bug, scores).eval()
