"""Recurrent networks and Transformers: path length between tokens, sequential steps and parameter counts."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.shapes import Float
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.small_models import decoder, dependence, seq2seq
from glassformer.theory.claims.weights.rational import Matrix, random_matrix

LENGTHS = range(2, 11)
WIDTH = 512
STATED = {"RNN": (2, 524_800), "GRU": (6, 1_574_400), "LSTM": (8, 2_099_200)}
"""Matrices of a layer, and parameters at width 512 with one bias per gate."""
Edges = set[tuple[int, int]]


class Recurrent(nn.Module):
    """The vanilla network: h_t = tanh(W x_t + R h_{t-1} + b), one step after another."""

    def __init__(self, d_in: int, d_hidden: int, generator: torch.Generator):
        super().__init__()
        self.read = nn.Linear(d_in, d_hidden, dtype=torch.float64)
        self.recur = nn.Linear(d_hidden, d_hidden, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(d_hidden))

    def step(self, x: Float[Tensor, "N"], h: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
        return torch.tanh(self.read(x) + self.recur(h))

    def forward(self, x: Float[Tensor, "T N"]) -> Float[Tensor, "T M"]:
        h, found = torch.zeros(self.recur.in_features, dtype=torch.float64), []
        for token in x:
            h = self.step(token, h)
            found.append(h)
        return torch.stack(found)


def recurrent_edges(lab: Lab, n: int) -> tuple[Edges, Edges]:
    """What step t reads, by its derivatives: (s, t) where h_t depends on token s, and where it depends on state s."""
    cell = Recurrent(3, 4, lab.torch_rng())
    x = torch.randn(n, 3, generator=lab.torch_rng(1), dtype=torch.float64).requires_grad_(True)
    states = [
        torch.randn(4, generator=lab.torch_rng(2 + t), dtype=torch.float64).requires_grad_(True) for t in range(n)
    ]
    reads, recurs = set(), set()
    for t in range(n):
        h = cell.step(x[t], states[t - 1]) if t else cell.step(x[t], torch.zeros(4, dtype=torch.float64))
        gradients = torch.autograd.grad(h.sum(), [x, *states], allow_unused=True)
        assert gradients[0] is not None
        reads |= {(s, t) for s in range(n) if bool(gradients[0][s].any())}
        recurs |= {(s, t) for s, g in enumerate(gradients[1:]) if g is not None and bool(g.any())}
    return reads, recurs


def attention_edges(lab: Lab, n: int) -> Edges:
    """(j, i) where output i of one layer of the engine depends on token j; the control sees its last neighbour only."""
    attention = c.Attention(2, window=2 if lab.broken else None)
    model = decoder(1, lab.seed, attention=attention, vocab_size=10)
    found = dependence(model, torch.arange(n)[None])
    return {(int(j), int(i)) for i, j in (found != 0).nonzero().tolist()}


def shortest(edges: Edges, start: int, end: int, limit: int = 100) -> int | None:
    """Return the smallest number of edges from one token's state to another's; None if there is no path."""
    reached, steps = {start}, 0
    while end not in reached:
        further = {j for i, j in edges if i in reached} - reached
        if not further or steps == limit:
            return None
        reached, steps = reached | further, steps + 1
    return steps


def longest(edges: Edges, n: int) -> int:
    """Return the number of nodes on the longest chain, which is the number of sequential steps."""
    depth = [1] * n
    for j in range(n):
        depth[j] = 1 + max((depth[i] for i, k in edges if k == j and i != j), default=0)
    return max(depth)


@claim("rnn-vs-transformer")
def rnn_vs_transformer(lab: Lab) -> Iterator[Finding]:
    yield from _paths(lab)
    yield from _lengths(lab)
    yield from _counts(lab)
    yield _linear_attention(lab)


def _paths(lab: Lab) -> Iterator[Finding]:
    wrong = sparse = 0
    recorded = {}
    for n in LENGTHS:
        reads, recurs = recurrent_edges(lab, n)
        sparse += reads != {(t, t) for t in range(n)} or recurs != {(t - 1, t) for t in range(1, n)}
        seen = attention_edges(lab, n)
        sparse += seen != {(j, i) for i in range(n) for j in range(i + 1)}
        direct = 1 if (0, n - 1) in seen else None
        recorded[n] = [shortest(recurs, 0, n - 1), direct, longest(recurs, n)]
        wrong += recorded[n] != [n - 1, 1, n]
    yield lab.exhaustive("what one step reads", sparse, 2 * len(LENGTHS))
    yield lab.exhaustive("paths", wrong, len(LENGTHS), paths=recorded)
    steps = {layers: _sequential(layers) for layers in (1, 2, 4)}
    holds = all(found == layers for layers, found in steps.items())
    yield lab.exact("sequential steps of a Transformer", holds, steps=steps)


def _sequential(layers: int) -> int:
    """Return the number of blocks called in sequence in one pass, or -1 if it depends on the length."""
    counts = set()
    for n in (1, 5, 10):
        model, calls = decoder(layers, vocab_size=10), [0]
        for block in model.blocks:
            block.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        with torch.no_grad():
            model(torch.arange(n)[None])
        counts.add(calls[0])
    return counts.pop() if len(counts) == 1 else -1


def _lengths(lab: Lab) -> Iterator[Finding]:
    """n inputs give n outputs in both families; another number needs a second sequence or a loop."""
    one, both, cell = (
        decoder(1, lab.seed, vocab_size=10),
        seq2seq(1, lab.seed, vocab_size=10),
        Recurrent(3, 4, lab.torch_rng()),
    )
    wrong = cases = 0
    for n in range(1, 7):
        with torch.no_grad():
            wrong += one(torch.arange(n)[None]).shape[1] != n
            wrong += cell(torch.ones(n, 3, dtype=torch.float64)).shape[0] != n
            wrong += sum(both(torch.arange(n)[None], torch.arange(m)[None]).shape[1] != m for m in range(1, 7))
        cases += 8
    yield lab.exhaustive("numbers of outputs", int(wrong), cases)


def _counts(lab: Lab) -> Iterator[Finding]:
    kinds: dict[str, Any] = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
    found = {}
    for name, kind in kinds.items():
        layer = kind(WIDTH, WIDTH, device="meta")
        gates = layer.weight_ih_l0.shape[0] // WIDTH
        found[name] = (2 * gates, sum(p.numel() for p in layer.parameters()) - layer.bias_hh_l0.numel())
    ours = sum(p.numel() for p in Recurrent(WIDTH, WIDTH, lab.torch_rng()).parameters())
    yield lab.exact("parameters at width 512", found == STATED and ours == STATED["RNN"][1], counted=found)
    names = {n.split(".", 3)[3] for n, p in decoder().named_parameters() if ".blocks.0." in n and p.dim() == 2}
    wanted = {f"attention.{x}.weight" for x in "qkvo"} | {"feedforward.up.weight", "feedforward.down.weight"}
    yield lab.exact("matrices of a Transformer layer", names == wanted)


def linear_attention(q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    """o_t = sum over s <= t of (q_t . k_s) v_s: the attention form, no softmax."""
    return np.array([sum(((q[t] @ k[s]) * v[s] for s in range(1, t + 1)), (q[t] @ k[0]) * v[0]) for t in range(len(q))])


def recurrence(q: Matrix, k: Matrix, v: Matrix, keep: Fraction = Fraction(1)) -> Matrix:
    """S_t = keep S_{t-1} + k_t v_t^T, o_t = q_t S_t: the recurrent form, a state of fixed size."""
    state, found = 0 * np.multiply.outer(k[0], v[0]), []
    for t in range(len(q)):
        state = keep * state + np.multiply.outer(k[t], v[t])
        found.append(q[t] @ state)
    return np.array(found)


def _linear_attention(lab: Lab) -> Finding:
    rng = lab.rng()
    q, k, v = random_matrix(rng, 5, 3), random_matrix(rng, 5, 3), random_matrix(rng, 5, 2)
    keep = Fraction(9, 10) if lab.broken else Fraction(1)
    same = bool((linear_attention(q, k, v) == recurrence(q, k, v, keep)).all())
    return lab.exact("linear attention is a recurrence", same)


@figure("rnn-vs-transformer", "From the first token to the last output", height=2.6)
def draw_graphs(lab: Lab, fig: Figure) -> None:
    n = 5
    _, recurs = recurrent_edges(lab, n)
    panels: dict[str, tuple[Edges, Edges, str]] = {
        "recurrent: four steps": ({(t, t) for t in range(n)}, recurs, "h"),
        "attention: one step": (attention_edges(lab, n), set(), "y"),
    }
    for ax, (title, (up, across, name)) in zip(fig.canvas.subplots(1, 2), panels.items(), strict=True):
        path = {(0, 0), *across} if across else {(0, n - 1)}
        for edges, (y0, y1) in ((up, (0, 1)), (across, (1, 1))):
            for i, j in sorted(edges, key=lambda edge: edge in path):
                on = (i, j) in path and (bool(across) or edges is up)
                style = {"arrowstyle": "->", "lw": 2.0 if on else 0.7, "color": COLOURS[1] if on else GREY}
                ax.annotate("", (j, y1), (i, y0), arrowprops={**style, "shrinkA": 10, "shrinkB": 10})
        for t in range(n):
            for y, text in ((0, f"$x_{t}$"), (1, f"${name}_{t}$")):
                ax.text(t, y, text, ha="center", va="center", bbox={"boxstyle": "circle", "fc": "white", "ec": "black"})
        ax.set(title=title, xlim=(-0.5, n - 0.5), ylim=(-0.35, 1.35))
        ax.axis("off")
