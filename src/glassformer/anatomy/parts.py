"""The parts of a Transformer found in a graph of elementary operations, by how numbers flow and by nothing else.

Attention is product, softmax, product. What feeds its two operands are the query, key and value projections; the first
projection after it is the output's; the addition that follows joins the residual stream; the projections from there to
the next attention are the feed-forward. Names of modules and classes play no part, so a fused qkv, a functional model
and a library's own layers are read alike.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassformer.anatomy.record import LAYOUT, SOFTMAXES, Graph, Node, ancestors, walk
from glassformer.anatomy.scores import as_heads, hidden_keys
from glassformer.shapes import Float


@dataclass(frozen=True)
class Lengths:
    """B rows of T tokens; with N source tokens each in an encoder-decoder."""

    B: int
    T: int
    N: int | None = None

    @property
    def known(self) -> tuple[int, ...]:
        return (self.T,) if self.N is None else (self.T, self.N)


@dataclass
class Projection:
    """x W (+ b), and which columns of it are read."""

    node: Node
    read: Float[Tensor, "B T D"]
    out: Float[Tensor, "B T O"]
    weight: Float[Tensor, "I O"]
    bias: Float[Tensor, "O"] | None
    names: tuple[str, ...] = ()
    """Parameters that the weight is made of."""


@dataclass
class Attention:
    """One attention, every value in the layout of docs/shapes.md. `*_flat` is a projection's part before arithmetic."""

    softmax: Node
    axis: int
    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B H S K"]
    v: Float[Tensor, "B H S U"]
    dots: Float[Tensor, "B H T S"]
    scores: Float[Tensor, "B H T S"]
    pattern: Float[Tensor, "B H T S"]
    weights: Float[Tensor, "B H T S"]
    """What multiplies the values: the pattern, unless something is done to it after softmax."""
    steps: tuple[str, ...]
    """The operations between softmax and the product with the values that change numbers."""
    heads: Float[Tensor, "B H T U"]
    projections: dict[str, Projection]
    flat: dict[str, Float[Tensor, "B N T K"]]
    stack: str = ""
    cross: bool = False
    merged: Projection | None = None
    """The output projection: what it reads is the concatenation of the heads."""
    last: Node | None = None
    """The product with the values."""


@dataclass
class Feed:
    """A feed-forward: projections that read the stream, and the one that writes to it."""

    first: list[Projection]
    down: Projection
    dense: bool = True
    """False for a mixture of experts, whose inside is not followed."""


@dataclass
class Block:
    attention: Attention
    feed: Feed | None = None
    entering: Float[Tensor, "B T D"] | None = None
    """The stream before attention is added."""
    joined: Float[Tensor, "B T D"] | None = None
    """After attention was added; None where both branches are added at once."""
    leaving: Float[Tensor, "B T D"] | None = None
    before: list[Float[Tensor, "B T D"]] = field(default_factory=list)
    """What the entering stream of a first block was made from, latest last."""


@dataclass
class Anatomy:
    """All that was recognised, in the order of computation."""

    lengths: Lengths
    embedded: Float[Tensor, "B T D"] | None
    table: Float[Tensor, "V D"] | None
    blocks: list[Block]
    head: Projection | None
    logits: Float[Tensor, "B T V"]
    operations: Counter[str] = field(default_factory=Counter)
    """How often each elementary operation that changes numbers is computed from the tokens."""
    notes: list[str] = field(default_factory=list)


class Reader:
    """Walks one graph."""

    def __init__(self, graph: Graph, lengths: Lengths):
        self.graph, self.lengths = graph, lengths

    def nearest(self, node: Node) -> set[Node]:
        """Landmarks a node comes from, itself if it is one."""
        return {n for n in walk([node], lambda n: [] if n.is_landmark else n.inputs) if n.is_landmark}

    def linear_of(self, node: Node) -> Node | None:
        return max((n for n in self.nearest(node) if n.is_linear), key=lambda n: n.index, default=None)

    def stream(self, node: Node, partner: Node | None = None) -> Tensor:
        """(B,T,·), whatever the layout. `partner` has the same layout, and is asked if `node` does not show it."""
        B, value = self.lengths.B, node.value
        if value.shape[0] != B or value.dim() != 3 or value.shape[1] not in self.lengths.known:
            rows = value.numel() // value.shape[-1]
            if rows % B:
                return value.double().cpu()
            time_first = self._time_first(node)
            if time_first is None and partner is not None:
                time_first = self._time_first(partner)
            value = (
                value.reshape(-1, B, value.shape[-1]).transpose(0, 1)
                if time_first
                else value.reshape(B, -1, value.shape[-1])
            )
        return value.double().cpu()

    def _time_first(self, node: Node) -> bool | None:
        """Whether rows are ordered (T,B): neighbours that only view the same numbers tell; None where none does."""
        B, known = self.lengths.B, self.lengths.known
        near = walk([node], lambda n: [m for m in (*n.inputs, *n.users) if _same_numbers(n, m)])
        for other in sorted(near, key=lambda n: abs(n.index - node.index)):
            shape = other.value.shape
            if len(shape) == 3 and shape[0] == B and shape[1] in known:
                return False
            if len(shape) == 3 and shape[1] == B and shape[0] in known:
                return True
        return None

    def projection(self, node: Node) -> Projection:
        live, still = node.factors if node.factors[0].live else node.factors[::-1]
        # `linear`, which inference mode does not decompose, multiplies by the transposed weight
        as_stored = (node.factors[1] is still) != (node.op == "linear")
        weight = still.value if as_stored else still.value.transpose(-1, -2)
        weight = weight[0] if weight.dim() == 3 else weight
        out, bias = node, node.bias
        if bias is None:
            after = self.graph.after(node, _adds_a_constant, lambda n: n.op not in LAYOUT)
            if after is not None:
                out, bias = after, next(i.value for i in after.inputs if not i.live)
        names = tuple(sorted({n.name for n in walk([still], lambda n: n.inputs) if n.name}))
        exact = None if bias is None else bias.double().cpu().reshape(-1)
        return Projection(node, self.stream(live, out), self.stream(out, live), weight.double().cpu(), exact, names)

    def heads(self, node: Node, transposed: bool = False) -> Tensor:
        """Return an operand of a matmul as (B,H,T,K), in its own layout where that is unknown."""
        value = node.value.transpose(-1, -2) if transposed else node.value
        by_head = as_heads(value, self.lengths.B)
        return (value if by_head is None else by_head).double().cpu()

    def flat(self, linear: Node | None, operand: Node, width: int) -> Tensor | None:
        """The part of a projection that an operand is made of, split into heads and not yet touched: (B,N,T,K)."""
        if linear is None:
            return None
        start = self.graph.after(linear, _adds_a_constant, lambda n: n.op not in LAYOUT) or linear
        used = ancestors(operand)

        def moved(allowed: Callable[[Node], bool]) -> Iterator[Node]:
            return walk(
                [start], lambda n: [m for m in n.users if allowed(m) and m.index in used and not _repeats(n, m)]
            )

        found = self._split(moved(lambda n: n.op in LAYOUT), width)
        return found if found is not None else self._split(moved(_moves), width)

    def _split(self, moved: Iterable[Node], width: int) -> Tensor | None:
        """The last of some views that is split into heads."""
        B, known = self.lengths.B, self.lengths.known
        best: Tensor | None = None
        for node in sorted(moved, key=lambda n: n.index):
            shape = node.value.shape
            if len(shape) == 4 and shape[-1] == width and shape[0] == B and (shape[1] in known) != (shape[2] in known):
                best = node.value.transpose(1, 2) if shape[1] in known else node.value
            elif len(shape) == 3 and shape[-1] == width and shape[0] in known and shape[1] % B == 0:
                best = node.value.unflatten(1, (B, -1)).permute(1, 2, 0, 3)
        return None if best is None else best.double().cpu()

    def attentions(self) -> list[Attention]:
        found: list[Attention] = []
        for softmax in self.graph.nodes:
            # a softmax of attention weights belongs to the attention that they are of
            again = any(a.softmax.index in self.graph.since_landmark(softmax) for a in found)
            if softmax.op in SOFTMAXES and softmax.live and not again:
                made = self._attention(softmax)
                if made is not None:
                    found.append(made)
        return found

    def _attention(self, softmax: Node) -> Attention | None:
        dots = max((n for n in self.nearest(softmax.inputs[0]) if n.is_mixing), key=lambda n: n.index, default=None)
        last = self.graph.after(softmax, lambda n: n.is_mixing, lambda n: n.is_landmark)
        if dots is None or last is None:
            return None
        # the pattern may stand on either side of its product
        side = 0 if softmax.index in ancestors(last.factors[0]) else 1
        operands = {"q": dots.factors[0], "k": dots.factors[1], "v": last.factors[1 - side]}
        linears = {name: self.linear_of(node) for name, node in operands.items()}
        q, k = self.heads(operands["q"]), self.heads(operands["k"], transposed=True)
        v = self.heads(operands["v"], transposed=side == 1)
        scores = self.heads(softmax.inputs[0])
        flat = {n: self.flat(linears[n], o, v.shape[-1] if n == "v" else q.shape[-1]) for n, o in operands.items()}
        axis = int(next((a for a in softmax.args if isinstance(a, int) and not isinstance(a, bool)), -1))
        made = Attention(
            softmax,
            axis - softmax.value.dim() if axis >= 0 else axis,
            *(q, k, v, self.heads(dots), scores, self.heads(softmax)),
            self.heads(last.factors[side], transposed=side == 1),
            self.graph.changes(softmax, last.factors[side]),
            self.heads(last, transposed=side == 1),
            {name: self.projection(node) for name, node in linears.items() if node is not None},
            {name: value for name, value in flat.items() if value is not None},
            last=last,
        )
        if made.heads.dim() != 4 or made.scores.dim() != 4 or made.q.dim() != 4:
            return None
        self._place(made)
        return made

    def _place(self, made: Attention) -> None:
        q, k = made.projections.get("q"), made.projections.get("k")
        if self.lengths.N is not None:
            made.stack = "encoder." if made.q.shape[2] == self.lengths.N else "decoder."
            made.cross = made.stack == "decoder." and made.k.shape[2] == self.lengths.N
        elif q is not None and k is not None:
            # keys of other positions; their width may differ, as in latent attention
            made.cross = q.read.shape[:-1] != k.read.shape[:-1]

    def joins(self, node: Node) -> Node | None:
        """The addition in which a branch meets the stream: both sides depend on the tokens and have its size."""

        def joining(n: Node) -> bool:
            if n.op != "add" or sum(i.live and i.value.is_floating_point() for i in n.inputs) != 2:
                return False
            if not n.inputs[0].value.shape == n.inputs[1].value.shape == n.value.shape:
                return False
            # inside a branch both sides come from it, as in tanh GELU's x + 0.0447 x^3
            return [node.index in ancestors(i) for i in n.inputs].count(True) == 1

        return self.graph.after(node, joining, lambda n: n.is_landmark or n.op in SOFTMAXES)

    def other_side(self, join: Node, *branches: Node) -> Node | None:
        """The operand of an addition that comes from none of the branches."""
        for operand in join.inputs:
            if operand.live and not any(b.index in ancestors(operand) for b in branches):
                return operand
        return None


def _same_numbers(a: Node, b: Node) -> bool:
    later = a if a.index > b.index else b
    moved = later.op in ("view", "_unsafe_view", "reshape", "alias", "clone", "_to_copy", "detach", "add", "expand")
    return moved and a.value.numel() == b.value.numel() and a.value.shape[-1:] == b.value.shape[-1:]


def _moves(node: Node) -> bool:
    """Layout, or a factor for all numbers alike: some scale the queries before they split them into heads."""
    return node.op in LAYOUT or (
        node.op in ("mul", "div")
        and all(i.live or i.value.numel() == 1 for i in node.inputs)
        and sum(i.live for i in node.inputs) == 1
    )


def _repeats(before: Node, after: Node) -> bool:
    return after.value.numel() > before.value.numel()


def _adds_a_constant(node: Node) -> bool:
    """A bias added after its product."""
    still = [i for i in node.inputs if not i.live]
    return node.op == "add" and len(node.inputs) == 2 and len(still) == 1 and still[0].value.dim() == 1


def read_anatomy(graph: Graph, lengths: Lengths, logits: Float[Tensor, "B T V"]) -> Anatomy:
    """Everything recognised in one forward."""
    reader = Reader(graph, lengths)
    attentions = reader.attentions()
    taken = {p.node.index for a in attentions for p in a.projections.values()}
    linears = [n for n in graph.nodes if n.is_linear and n.index not in taken]
    blocks: list[Block] = []
    end = 0
    for number, attention in enumerate(attentions):
        assert attention.last is not None
        limit = attentions[number + 1].softmax.index if number + 1 < len(attentions) else len(graph.nodes)
        start = attention.last.index
        block, end = _block(reader, attention, [n for n in linears if start < n.index < limit])
        if block.entering is not None and not any(b.attention.stack == attention.stack for b in blocks):
            block.before = _made_from(reader, block.entering, start)
        blocks.append(block)
    tail = [n for n in linears if n.index > end and n.value.shape[-1] == logits.shape[-1]]
    embedding = next((n for n in graph.nodes if n.op == "embedding" and n.live), None)
    return Anatomy(
        lengths,
        None if embedding is None else reader.stream(embedding),
        None if embedding is None else embedding.inputs[0].value.double().cpu(),
        blocks,
        reader.projection(tail[-1]) if tail else None,
        logits.double().cpu(),
        graph.operations(),
    )


def _block(reader: Reader, attention: Attention, linears: list[Node]) -> tuple[Block, int]:
    """The block around an attention, and the index of its last operation."""
    assert attention.last is not None
    block = Block(attention)
    output = next((n for n in linears if attention.last in reader.nearest(_live_factor(n))), None)
    if output is None:
        return block, attention.last.index
    attention.merged = reader.projection(output)
    join = reader.joins(output)
    if join is None:
        return block, output.index
    rest = [n for n in linears if n.index > output.index]
    ends = [(n, e) for n in rest if (e := reader.joins(n)) is not None]
    if not ends or (ends[0][1].index < join.index and output.index not in ancestors(ends[0][1])):
        block.entering, block.joined = _value(reader, reader.other_side(join, output)), reader.stream(join)
        return block, join.index
    down = ends[0][0]
    end: Node | None = ends[0][1]
    same = [n for n, e in ends if e is end]
    apart = join.index in ancestors(_live_factor(down)) or join.index in ancestors(_live_factor(rest[0]))
    if apart:
        block.entering, block.joined = _value(reader, reader.other_side(join, output)), reader.stream(join)
    else:
        # both branches at once: x + a + f, or x + (a + f)
        while end is not None and (output.index not in ancestors(end) or down.index not in ancestors(end)):
            end = reader.joins(end)
        further = None if end is None else reader.joins(end)
        for candidate in (join, end, further):
            side = None if candidate is None else reader.other_side(candidate, output, down)
            if side is not None:
                block.entering = _value(reader, side)
                end = end if candidate is not further else candidate
                break
    if end is None:
        return block, down.index
    block.leaving = reader.stream(end)
    inside = [n for n in rest if n.index <= down.index]
    first = [n for n in inside if n is not down and not any(m in reader.nearest(_live_factor(n)) for m in inside)]
    rows = {n.value.numel() // n.value.shape[-1] for n in inside}
    block.feed = Feed([reader.projection(n) for n in first], reader.projection(down), len(same) == 1 and len(rows) == 1)
    return block, end.index


def _made_from(reader: Reader, stream: Tensor, limit: int) -> list[Tensor]:
    """Values of the stream's own shape on the way from the tokens to it."""
    node = next(
        (
            n
            for n in reader.graph.nodes[:limit]
            if n.live and n.value.shape == stream.shape and torch.equal(n.value.double().cpu(), stream)
        ),
        None,
    )
    if node is None:
        return []
    inside = ancestors(node) - {node.index}
    same = [n for n in reader.graph.nodes if n.index in inside and n.live and n.value.shape == node.value.shape]
    return [reader.stream(n) for n in same][-12:]


def _live_factor(linear: Node) -> Node:
    return linear.factors[0] if linear.factors[0].live else linear.factors[1]


def _value(reader: Reader, node: Node | None) -> Tensor | None:
    return None if node is None else reader.stream(node)


def visible(attention: Attention) -> Float[Tensor, "B H T S"]:
    """Return 1.0 where a key is visible to a query, 0.0 where it is masked."""
    return (~hidden_keys(attention.scores)).to(torch.float64)
