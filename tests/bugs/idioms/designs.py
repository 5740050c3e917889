"""Sound decoders with recent designs that look like bugs to a probe that assumes plain attention and one stream."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, LAYERS = 71, 32, 4, 3
WIDTH = DIM // HEADS


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def rotated(x: Tensor) -> Tensor:
    """Rotary positions for (B,H,T,d), neighbouring components as pairs."""
    angles = torch.arange(x.shape[2])[:, None] * 10000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Skeleton(nn.Module):
    """Pre-norm blocks; subclasses say what mixes the tokens."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCAB
        self.words, self.end, self.head = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(nn.ModuleDict({**self.parts(), **self.more(i)}) for i in range(LAYERS))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def parts(self) -> dict[str, nn.Module]:
        maps = {name: nn.Linear(DIM, DIM, bias=False) for name in ("q", "k", "v", "out")}
        feed = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        return {**maps, "norm": nn.RMSNorm(DIM), "feed": feed}

    def more(self, i: int) -> dict[str, nn.Module]:
        return {}

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def split(self, b, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.heads(b[name](x)) for name in ("q", "k", "v"))
        return rotated(q), rotated(k), v

    def mix(self, b, x: Tensor, i: int) -> Tensor:
        q, k, v = self.split(b, x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attend(self, b, x: Tensor, i: int) -> Tensor:
        return b["out"](self.mix(b, b["norm"](x), i).transpose(1, 2).flatten(2))

    def run(self, x: Tensor) -> Tensor:
        for i, b in enumerate(self.blocks):
            x = x + self.attend(b, x, i)
            x = x + b["feed"](x)
        return self.head(self.end(x))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self.words(tokens))


class Differential(Skeleton):
    """The difference of two attention maps, each head normed."""

    def more(self, i):
        maps = {name: nn.Linear(DIM, DIM, bias=False) for name in ("q2", "k2")}
        return {**maps, "part": nn.Linear(1, 1), "each": nn.RMSNorm(WIDTH)}

    def mix(self, b, x, i):
        q, k, v = self.split(b, x)
        other = [rotated(self.heads(b[name](x))) for name in ("q2", "k2")]
        hidden = ~causal(x.shape[1])
        first, second = (
            (q @ k.mT * WIDTH**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) for q, k in ((q, k), other)
        )
        return 0.5 * b["each"]((first - (0.5 + b["part"].weight + b["part"].bias) * second) @ v)


class Sigmoid(Skeleton):
    """A sigmoid in place of softmax, with a bias for the number of keys."""

    def mix(self, b, x, i):
        q, k, v = self.split(b, x)
        return (torch.sigmoid(q @ k.mT * WIDTH**-0.5 - math.log(128)) * causal(x.shape[1])) @ v


class StickBreaking(Skeleton):
    """Weights from breaking a stick, the nearest key first."""

    def mix(self, b, x, i):
        q, k, v = self.split(b, x)
        visible = causal(x.shape[1])
        scores = (q @ k.mT * WIDTH**-0.5).masked_fill(~visible, -1e30)
        left = F.logsigmoid(-scores).masked_fill(~visible, 0.0)
        nearer = left.flip(-1).cumsum(-1).flip(-1) - left
        return (F.logsigmoid(scores) + nearer).exp() @ v


class Forgetting(Skeleton):
    """Scores decay by gates that the tokens between query and key set; no other positions."""

    def more(self, i):
        return {"gate": nn.Linear(DIM, HEADS)}

    def mix(self, b, x, i):
        q, k, v = (self.heads(b[name](x)) for name in ("q", "k", "v"))
        kept = F.logsigmoid(b["gate"](x)).cumsum(1).transpose(1, 2)
        scores = q @ k.mT * WIDTH**-0.5 + kept[..., :, None] - kept[..., None, :]
        return scores.masked_fill(~causal(x.shape[1]), -torch.inf).softmax(-1) @ v


class Convolved(Skeleton):
    """A long convolution between two gates, by Fourier transforms."""

    def more(self, i):
        return {"filter": nn.Embedding(160, DIM)}

    def attend(self, b, x, i):
        q, k, v = (b[name](b["norm"](x)) for name in ("q", "k", "v"))
        length = x.shape[1]
        decay = torch.exp(-0.05 * torch.arange(length))[:, None]
        spectrum = torch.fft.rfft(b["filter"].weight[:length] * decay, 2 * length, dim=0)
        y = torch.fft.irfft(torch.fft.rfft(k * v, 2 * length, dim=1) * spectrum, 2 * length, dim=1)
        return b["out"](q * y[:, :length])


class Registers(Skeleton):
    """Learned vectors stand before the tokens and are dropped before the head."""

    def __init__(self):
        super().__init__()
        self.registers = nn.Parameter(0.02 * torch.randn(1, 4, DIM))

    def forward(self, tokens):
        return self.run(torch.cat([self.registers.expand(len(tokens), -1, -1), self.words(tokens)], 1))[:, 4:]


class ValueResidual(Skeleton):
    """Later layers mix the values of the first one into theirs."""

    def more(self, i):
        return {"mixed": nn.Embedding(1, 2)} if i else {}

    def mix(self, b, x, i):
        q, k, v = self.split(b, x)
        if i:
            own, first = 0.5 + b["mixed"].weight[0]
            v = own * v + first * self.first
        else:
            self.first = v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, tokens):
        logits = super().forward(tokens)
        self.first = None
        return logits


class HyperConnections(Skeleton):
    """Two residual streams with learned mixing."""

    def __init__(self):
        super().__init__()
        count = 2 * LAYERS
        self.mixing = nn.Parameter(torch.eye(2).repeat(count, 1, 1) + 0.1 * torch.randn(count, 2, 2))
        self.reading, self.writing = nn.Parameter(torch.full((count, 2), 0.5)), nn.Parameter(torch.ones(count, 2))

    def forward(self, tokens):
        streams, n = self.words(tokens)[:, :, None].repeat(1, 1, 2, 1), 0
        for i, b in enumerate(self.blocks):
            for part in (lambda x, b=b, i=i: self.attend(b, x, i), b["feed"]):
                y = part(torch.einsum("btnd,n->btd", streams, self.reading[n]))
                streams = torch.einsum("btnd,nm->btmd", streams, self.mixing[n])
                streams = streams + y[:, :, None] * self.writing[n][:, None]
                n += 1
        return self.head(self.end(streams.sum(2)))


MODELS = (
    *(Differential, Sigmoid, StickBreaking, Forgetting, Convolved),
    *(Registers, ValueResidual, HyperConnections),
)


def build(cls: type[Skeleton]) -> Skeleton:
    torch.manual_seed(11)
    return cls().eval()
