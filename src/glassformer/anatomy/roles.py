"""Name the activations of a model in the order of computation, each with those it is computed from.

Names are those of `model.context.Tap` where it has one. The others are `tokens` (the rows of the embedding table),
`attention.projected_q` and so on (a projection split into heads, before rotation), `attention.mask` (1 where a key is
visible), `attention.weights` (what multiplies the values), `attention.merged` (the heads concatenated), `attention.sum`
and `feedforward.sum` (a branch added to the residual stream).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassformer.anatomy.fits import distance
from glassformer.anatomy.parts import Anatomy, Block, Projection, visible
from glassformer.shapes import Float


@dataclass
class Role:
    """One activation of one model. `kind` is its name without the layer; `block` the block it lies in, if any."""

    name: str
    kind: str
    value: Tensor
    after: tuple[str, ...]
    block: Block | None = None
    source: Float[Tensor, "B T D"] | None = None
    """The stream that a norm reads, where the activation is what a norm gives."""
    projection: Projection | None = None
    pieces: list[Tensor] = field(default_factory=list)


def roles_of(anatomy: Anatomy) -> dict[str, Role]:
    """Every activation that was recognised, in order."""
    found = _Roles()
    if anatomy.embedded is not None:
        found.put("tokens", "tokens", anatomy.embedded)
    layers: dict[str, int] = {}
    stream: dict[str, Tensor | None] = {}
    last: dict[str, str] = {}
    for block in anatomy.blocks:
        stack = block.attention.stack
        if not block.attention.cross:
            layers[stack] = layers.get(stack, -1) + 1
        name = f"{stack}blocks.{max(layers.get(stack, 0), 0)}."
        if stack not in last and block.entering is not None:
            found.put(f"{stack}embed", "embed", block.entering, "tokens")
            last[stack] = f"{stack}embed"
        before = stream.get(stack)
        _attention(found, name, block, before if before is not None else block.entering, last.get(stack, "tokens"))
        branch = name + ("cross" if block.attention.cross else "attention")
        inner = f"{branch}.sum" if f"{branch}.sum" in found.roles else last.get(stack, "tokens")
        if block.feed is not None:
            _feed(found, name, block, inner)
        ends = [n for n in (f"{name}feedforward.sum", f"{branch}.sum", f"{branch}.out") if n in found.roles]
        last[stack] = ends[0] if ends else last.get(stack, "tokens")
        stream[stack] = block.leaving if block.leaving is not None else block.joined
    end = last.get("decoder.", last.get("", "tokens"))
    if anatomy.head is not None:
        found.put("final", "final", anatomy.head.read, end, source=stream.get("decoder.", stream.get("")))
        found.put("logits", "logits", anatomy.logits, "final", projection=anatomy.head)
    else:
        found.put("logits", "logits", anatomy.logits, end)
    return found.roles


class _Roles:
    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}

    def put(
        self,
        name: str,
        kind: str,
        value: Tensor | None,
        *after: str,
        block: Block | None = None,
        source: Tensor | None = None,
        projection: Projection | None = None,
        pieces: list[Tensor] | None = None,
    ) -> None:
        if value is not None:
            known = tuple(a for a in after if a in self.roles)
            self.roles[name] = Role(name, kind, value, known, block, source, projection, pieces or [])


def _attention(found: _Roles, layer: str, block: Block, source: Tensor | None, stream: str) -> None:
    a = block.attention
    at = layer + ("cross." if a.cross else "attention.")
    q = a.projections.get("q")
    found.put(at + "normed", "normed", None if q is None else q.read, stream, block=block, source=source)
    for name in ("q", "k", "v"):
        projection = a.projections.get(name)
        flat = a.flat.get(name)
        found.put(f"{at}projected_{name}", "projected", flat, at + "normed", block=block, projection=projection)
        found.put(at + name, name, getattr(a, name), f"{at}projected_{name}", at + "normed", block=block)
    found.put(at + "mask", "mask", visible(a), block=block)
    found.put(at + "scores", "scores", a.scores, at + "q", at + "k", at + "mask", block=block)
    found.put(at + "pattern", "pattern", a.pattern, at + "scores", at + "mask", block=block)
    found.put(at + "weights", "weights", a.weights, at + "pattern", block=block)
    found.put(at + "heads", "heads", a.heads, at + "weights", at + "v", block=block)
    if a.merged is not None:
        found.put(at + "merged", "merged", a.merged.read, at + "heads", block=block)
        found.put(at + "out", "out", a.merged.out, at + "merged", block=block, projection=a.merged)
    found.put(at + "sum", "sum", block.joined, at + "out", stream, block=block, source=block.entering)


def _feed(found: _Roles, layer: str, block: Block, stream: str) -> None:
    feed, at = block.feed, layer + "feedforward."
    assert feed is not None
    out = []
    if feed.dense and feed.first:
        read = feed.first[0].read
        source = block.joined if block.joined is not None else block.entering
        pieces = [p for f in feed.first for p in _pieces(f.out, feed.down.read.shape[-1])]
        found.put(at + "normed", "normed", read, stream, block=block, source=source)
        pre = torch.cat(pieces, -1)
        projection = feed.first[0] if len(feed.first) == 1 else None
        found.put(at + "pre", "pre", pre, at + "normed", block=block, projection=projection, pieces=pieces)
        found.put(at + "post", "post", feed.down.read, at + "pre", block=block, pieces=pieces)
        found.put(at + "out", "out", feed.down.out, at + "post", block=block, projection=feed.down)
        out = [at + "out"]
    extra = [n for n in (layer + "attention.out",) if block.joined is None]
    found.put(at + "sum", "sum", block.leaving, *out, *extra, stream, block=block, source=block.joined)


def _pieces(out: Tensor, width: int) -> list[Tensor]:
    return list(out.split(width, -1)) if out.shape[-1] % width == 0 and out.shape[-1] > width else [out]


def differences(a: Role, b: Role, real: Tensor | None = None) -> float:
    """How far two activations differ, relative to their size, in what the rest of the model can notice.

    Queries and keys up to a factor (a scale may be folded into either), scores where both see, up to a constant per
    row (softmax does not notice it), projections of a gated feed-forward in either order. `real` (B,T) marks what is no
    padding.
    """
    x, y = a.value, b.value
    if a.kind == "pre" and len(a.pieces) == len(b.pieces) == 2:
        x, y = _in_either_order(a.pieces, b.pieces)
    if x.shape != y.shape:
        return float("inf")
    if a.kind in ("q", "k"):
        x, y = (_unit(t) for t in (x, y))
    if a.kind == "scores" and a.block is not None and b.block is not None:
        both = visible(a.block.attention).bool() & visible(b.block.attention).bool()
        x, y = (_centred(t, both) for t in (x, y))
    if real is not None:
        x, y = (_real_positions(t, real) for t in (x, y))
    return distance(x, y)


def _in_either_order(a: list[Tensor], b: list[Tensor]) -> tuple[Tensor, Tensor]:
    x = torch.cat(a, -1)
    orders = [torch.cat(b, -1), torch.cat(b[::-1], -1)]
    return x, min(orders, key=lambda y: distance(x, y))


def _unit(t: Tensor) -> Tensor:
    return t / t.square().mean().sqrt().clamp(min=1e-300)


def _centred(scores: Tensor, seen: Tensor) -> Tensor:
    kept = torch.where(seen, scores, torch.zeros_like(scores))
    mean = kept.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, scores - mean, torch.zeros_like(scores))


def _real_positions(t: Tensor, real: Tensor) -> Tensor:
    """Padding zeroed: what stands there means nothing. That a real token reads it does, so key columns stay."""
    T = real.shape[1]
    if t.dim() == 3 and t.shape[1] == T:
        return torch.where(real[..., None], t, torch.zeros_like(t))
    return torch.where(real[:, None, :, None], t, torch.zeros_like(t)) if t.dim() == 4 and t.shape[2] == T else t


@dataclass
class Step:
    """One activation in both models and how far they are apart there."""

    name: str
    difference: float
    differs: bool
    absolved: bool = False
    """It differs, and nothing computed from it does: another way to write the same thing."""


def walk_roles(
    a: dict[str, Role], b: dict[str, Role], bound: Callable[[str], float], real: Tensor | None
) -> list[Step]:
    """Every shared activation in order, compared; differences without consequence are marked."""
    shared = [name for name in a if name in b]
    steps = {n: Step(n, d := differences(a[n], b[n], real), d > bound(n)) for n in shared}
    users: dict[str, list[str]] = {name: [] for name in shared}
    for name in shared:
        for before in a[name].after:
            if before in users:
                users[before].append(name)
    for name in reversed(shared):
        step = steps[name]
        if step.differs and users[name] and not any(steps[u].differs and not steps[u].absolved for u in users[name]):
            step.absolved = True
    return list(steps.values())
