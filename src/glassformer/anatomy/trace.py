"""What each attention of one recorded forward computes, read from its graph of operations.

Each tensor has a lineage: the scalar factors since its projection, the q·k matmul it comes from, the softmax, the
linear layer. The lineage gives the scale, the softmax axis, the mask, and q, k and v of each attention. The reader
assumes nothing about shapes, so it also reads one step with a KV cache; `parts` reads whole blocks of a plain forward.
"""

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from glassformer.anatomy.record import LAYOUT, MATMULS, OVERWRITTEN, SOFTMAXES, Graph, Node
from glassformer.anatomy.scores import as_heads, keys_last

CARRIES = (LAYOUT - {"copy"}) | {
    "as_strided", "cat", "stack", "unfold", "flip", "view_as_complex", "view_as_real", "index",
}  # fmt: skip
"""Operations that pass the lineage of a tensor on unchanged, also where they gather several tensors."""
KEEPS = frozenset([
    "add", "sub", "rsub", "masked_fill", "where", "neg", "maximum", "minimum", "clamp", "tril", "triu", "bernoulli",
    "native_dropout", "dropout", "copy", "index_put", "index_copy", "scatter", "roll", "constant_pad_nd", "nan_to_num",
])  # fmt: skip
"""Operations that change numbers and leave factors and matmuls of the lineage as they are."""
INVERSE = frozenset(["rsqrt", "sqrt", "reciprocal", "linalg_vector_norm", "norm", "exp", "clamp_min"])
ROOTS = (0.5, -0.5, -1, -1.0)
"""Exponents of `pow` that make a norm of a sum of squares, or its inverse."""
NORMS = frozenset(["native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"])
REDUCTIONS = frozenset(["mean", "var", "std", "var_mean", "sum"])
ACTIVATIONS = frozenset(["gelu", "silu", "relu", "sigmoid", "mish", "elu", "hardswish"])
LEAVES_WEIGHTS = frozenset([
    "masked_fill", "where", "tril", "triu", "native_dropout", "dropout", "bernoulli", "nan_to_num", "copy",
    "constant_pad_nd",
])  # fmt: skip
"""Operations on attention weights that keep a weight or set it to a constant."""


@dataclass
class Linear:
    """One linear layer: the storage of its parameter, its input and output, and the module that ran it."""

    weight: int
    input: Tensor
    output: Tensor
    path: str
    sources: tuple["Linear", ...] = ()
    """The linear layers whose outputs this one reads, with no other matmul in between."""
    mixes: bool = False
    """Whether it also reads a matmul of two activations, such as attention heads."""


@dataclass
class TracedAttention:
    """One softmax over q·k, as it was computed. Tensors keep the layout of the call: scores (..., T, S)."""

    q: Tensor
    k: Tensor
    scale: float
    normed: bool
    learned_scale: bool
    capped: bool
    rotated: tuple[bool, bool]
    """Whether q and k were multiplied component by component since their projection (a rotation; not a norm)."""
    scores: Tensor
    weights: Tensor
    dim: int
    path: str
    v: Tensor | None = None
    out: Tensor | None = None
    contracted: Tensor | None = None
    """The weights as the second matmul reads them: (N, T, S), with sum 1 over the last axis."""
    merged: Tensor | None = None
    """The input of the next linear layer, if only layout operations lie between."""
    maps: frozenset[int] = frozenset()
    """Storages of the linear layers that q and k come from."""
    changes: tuple[str, ...] = ()
    """Operations on the weights between softmax and the matmul with v, other than layout and factors."""
    mixed: bool = False
    """Whether tensors other than the weights themselves took part in them."""
    v_maps: frozenset[int] = frozenset()
    """Storages of the linear layers that v comes from."""
    v_linear: Tensor | None = None
    """Output of the linear layer that v comes from, if only layout operations lie between."""

    def pattern(self, rows: int) -> Tensor | None:
        """Return the softmax inputs as (B, H, T, S), or None for an unknown layout."""
        return as_heads(self.scores, rows)


@dataclass
class Lineage:
    """How a tensor was computed, as far as attention is concerned."""

    scale: float = 1.0
    product: tuple[Tensor, Tensor] | None = None
    normed: bool = False
    learned: bool = False
    capped: bool = False
    inverse: bool = False
    rotated: bool = False
    sides: tuple[bool, bool] = (False, False)
    softmax: TracedAttention | None = None
    heads: TracedAttention | None = None
    linear: Linear | None = None
    maps: frozenset[int] = frozenset()
    changes: tuple[str, ...] = ()
    mixed: bool = False
    content: bool = False
    """Whether both sides of the product depend on the tokens: q·k, not the product of q with positions."""
    total: TracedAttention | None = None
    """For a sum or another reduction of attention weights: the attention."""


@dataclass
class Trace:
    """Everything found in one forward, in order."""

    attentions: list[TracedAttention] = field(default_factory=list)
    linears: list[Linear] = field(default_factory=list)
    activations: list[tuple[str, str]] = field(default_factory=list)
    """(path, operation) of activation functions."""
    lookups: list[tuple[int, int, Tensor, str]] = field(default_factory=list)
    """(storage of the table, its number of rows, indices, path)."""
    reductions: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """(path, operation, shape, axes) of means, variances and norms."""
    selections: list[tuple[int, int]] = field(default_factory=list)
    """(size of the axis, number kept) of each top-k, in order."""
    logits: Tensor | None = None


def read_trace(graph: Graph, logits: Tensor | None = None) -> Trace:
    """Return the attentions, linear layers, activations, lookups and reductions of one recorded forward."""
    reader = _Reader(graph)
    for node in graph.nodes:
        with contextlib.suppress(RuntimeError, IndexError):
            reader.read(node)
    reader.trace.logits = logits
    return reader.trace


def _carries_scores(lineage: Lineage) -> bool:
    return lineage.product is not None or lineage.softmax is not None


def _is_mask(node: Node) -> bool:
    """Whether a tensor holds only zeros and ones, whatever the tokens are."""
    return not node.live and bool(((node.value == 0) | (node.value == 1)).all())


class _Reader:
    def __init__(self, graph: Graph):
        self.graph, self.trace = graph, Trace()
        self.lineages: dict[int, Lineage] = {}
        self.linears: dict[int, Linear] = {}

    def of(self, node: Any) -> Lineage:
        return self.lineages.get(node.index, Lineage()) if isinstance(node, Node) else Lineage()

    def read(self, node: Node) -> None:
        if node.op in CARRIES:
            self._carry(node, node.args[0])
        if node.op in ("embedding", "index_select"):
            self._lookup(node)
        if node.op == "topk" and not node.output:
            axis = int(node.args[2]) if len(node.args) > 2 else int(node.kwargs.get("dim", -1))
            self.trace.selections.append((node.args[0].value.shape[axis], int(node.args[1])))
        if node.op in CARRIES or node.output:
            return
        if node.op == OVERWRITTEN:
            # the tensor's own lineage; for a buffer, that of the last write
            self._carry(node, node.inputs[:1] if node.inputs[0].index in self.lineages else node.inputs)
        elif node.op not in MATMULS and self._after_softmax(node):
            pass
        elif node.op in ("mul", "div"):
            self._factor(node)
        elif node.op in MATMULS:
            self._matmul(node)
        elif node.op in SOFTMAXES:
            self._softmax(node)
        elif node.op in KEEPS:
            self._keep(node)
        elif node.op == "tanh":
            self.lineages[node.index] = replace(self.of(node.args[0]), capped=True, linear=None, heads=None)
            self.trace.activations.append((node.path, "tanh"))
        elif node.op in NORMS:
            self.lineages[node.index] = Lineage(normed=True, maps=self.of(node.args[0]).maps)
            self._norm(node)
        elif node.op in INVERSE or (node.op == "pow" and node.args[1] in ROOTS):
            self.lineages[node.index] = Lineage(inverse=True)
        elif node.op in REDUCTIONS and len(node.args) > 1 and isinstance(node.args[1], list):
            shape = tuple(node.args[0].value.shape)
            axes = tuple(a - len(shape) if a >= 0 else a for a in node.args[1])
            self.trace.reductions.append((node.path, node.op, shape, axes))
            self.lineages[node.index] = Lineage()
        elif node.op in ACTIVATIONS:
            default = node.args[1] if len(node.args) > 1 else "none"
            tanh = node.op == "gelu" and node.kwargs.get("approximate", default) == "tanh"
            self.trace.activations.append((node.path, "gelu_tanh" if tanh else node.op))
        elif node.in_place:
            self._keep(node)

    def _lookup(self, node: Node) -> None:
        table, indices = node.args[0], node.args[1] if node.op == "embedding" else node.args[2]
        if node.op == "embedding" or (table.value.dim() == 2 and node.args[1] == 0):
            self.trace.lookups.append((table.storage, len(table.value), indices.value, node.path))

    def _norm(self, node: Node) -> None:
        if node.op != "native_batch_norm":
            axes = tuple(range(-len(node.args[1]), 0)) if isinstance(node.args[1], list) else ()
            self.trace.reductions.append((node.path, node.op, tuple(node.args[0].value.shape), axes))

    def _after_softmax(self, node: Node) -> bool:
        """Follow attention weights to the matmul with v; return False if no operand is one."""
        main = next((a for a in node.args if self.of(a).softmax is not None), None)
        if main is None:
            return False
        was = self.of(main)
        if node.value.shape != main.value.shape:
            self.lineages[node.index] = Lineage(total=was.softmax)
            return True
        given = [a for a in node.args if isinstance(a, Node) and a is not main and not _is_mask(a)]
        others = [self.of(a) for a in given if a.value.numel() > 1]
        foreign = any(o.softmax is not was.softmax and o.total is not was.softmax for o in others)
        learned = any(isinstance(a, Node) and self.graph.is_parameter(a) for a in node.args)
        factor = node.op in ("mul", "div") and not others and node.args[0] is not node.args[1]
        if node.op in LEAVES_WEIGHTS or factor:
            self.lineages[node.index] = replace(was, heads=None)
        else:
            step = "softmax" if node.op in SOFTMAXES else node.op
            mixed = was.mixed or foreign or learned
            self.lineages[node.index] = replace(was, changes=(*was.changes, step), mixed=mixed, heads=None)
        return True

    def _carry(self, node: Node, source: Any) -> None:
        if isinstance(source, list | tuple):
            known = [n for n in source if isinstance(n, Node) and n.index in self.lineages]
            source = known[-1] if known else source[0]
        if isinstance(source, Node) and source.index in self.lineages:
            self.lineages[node.index] = self.lineages[source.index]

    def _main(self, node: Node) -> Node | None:
        """Return the operand whose lineage goes on: q·k, else other scores, else the largest known one."""
        known = [a for a in node.args if isinstance(a, Node) and a.index in self.lineages]
        known.sort(key=lambda n: (_carries_scores(self.of(n)), self.of(n).content, n.value.numel()))
        return known[-1] if known else None

    def _keep(self, node: Node) -> None:
        main = self._main(node)
        if main is None:
            return
        was = self.of(main)
        other = next((a for a in node.args[:2] if isinstance(a, Node) and a is not main), None)
        bias = node.op == "add" and other is not None and self.graph.is_parameter(other) and other.value.dim() == 1
        if bias and was.linear is not None:
            was.linear.output = node.value
            self.lineages[node.index] = was
            return
        self.lineages[node.index] = replace(was, linear=None, heads=None)

    def _factor(self, node: Node) -> None:
        main = self._main(node)
        if main is None:  # of unknown origin: a number is a factor all the same
            plain = [a for a in node.args[:2] if isinstance(a, Node) and a.value.numel() > 1]
            if len(plain) != 1:
                return
            main = plain[0]
        was = replace(self.of(main), linear=None, heads=None)
        other = node.args[1] if node.args[0] is main else node.args[0]
        if isinstance(other, int | float) or (isinstance(other, Node) and other.value.numel() == 1):
            value = float(other.value if isinstance(other, Node) else other)
            learned = was.learned or (isinstance(other, Node) and self.graph.is_parameter(other))
            if value != 0:
                scale = was.scale / value if node.op == "div" else was.scale * value
                self.lineages[node.index] = replace(was, scale=scale, learned=learned)
            return
        inverse = self.of(other).inverse
        # one number per vector, such as a temperature by position, rotates nothing
        by_vector = isinstance(other, Node) and other.value.dim() > 0 and other.value.shape[-1] == 1
        gain = inverse or by_vector or (isinstance(other, Node) and self.graph.is_parameter(other))
        per_head = isinstance(other, Node) and was.product is not None and 1 < other.value.numel() <= 64
        self.lineages[node.index] = replace(
            was, normed=was.normed or inverse, learned=was.learned or per_head, rotated=was.rotated or not gain
        )

    def _matmul(self, node: Node) -> None:
        left, right = node.factors
        weight = next((n for n in (right, left) if self.graph.is_parameter(n)), None)
        if weight is None:
            self._product(node, left, right)
        elif node.op in ("mm", "addmm", "linear"):
            self._linear(node, left if weight is right else right, weight)
        else:
            self.lineages[node.index] = Lineage(maps=frozenset([weight.storage]))

    def _linear(self, node: Node, read: Node, weight: Node) -> None:
        record = Linear(weight.storage, read.value, node.value, node.path)
        before = {read} if read.is_landmark else self.graph.landmarks_before(read)
        record.sources = tuple(self.linears[n.index] for n in before if n.index in self.linears)
        record.mixes = any(n.is_mixing for n in before)
        self.linears[node.index] = record
        self.trace.linears.append(record)
        heads = self.of(read).heads
        if heads is not None and heads.merged is None:
            heads.merged = read.value
        self.lineages[node.index] = Lineage(linear=record, maps=frozenset([weight.storage]))

    def _product(self, node: Node, left: Node, right: Node) -> None:
        """Read q·k, or the matmul of the attention weights with v."""
        a, b = self.of(left), self.of(right)
        attention = a.softmax or b.softmax
        if attention is not None:
            if attention.out is None:
                v, w = (b, a) if a.softmax is not None else (a, b)
                attention.changes, attention.mixed, attention.v_maps = w.changes, w.mixed, v.maps
                attention.out, attention.v = node.value, right.value if a.softmax is not None else left.value
                attention.contracted = left.value if a.softmax is not None else right.value.transpose(-1, -2)
                attention.v_linear = v.linear.output if v.linear is not None else None
            self.lineages[node.index] = Lineage(heads=attention)
            return
        alpha = float(node.kwargs.get("alpha", 1)) if node.op in ("baddbmm", "addmm", "addmv") else 1.0
        self.lineages[node.index] = Lineage(
            a.scale * b.scale * alpha,
            (left.value, right.value),
            normed=a.normed or b.normed,
            learned=a.learned or b.learned,
            sides=(a.rotated, b.rotated),
            maps=a.maps | b.maps,
            content=left.live and right.live,
        )

    def _softmax(self, node: Node) -> None:
        read, dim = node.args[0], int(node.args[1])
        was = self.of(read)
        if was.product is None:
            self.lineages[node.index] = Lineage()
            return
        scores, weights = read.value if read.live else read.value.clone(), node.value
        if (keys := self._key_columns(read)) is not None and dim % read.value.dim() == read.value.dim() - 1:
            scores, weights = scores[..., keys], weights[..., keys]
        order = keys_last(tuple(scores.shape), was.product[0].shape[-2], was.product[1].shape[-1])
        found = TracedAttention(
            *was.product,
            scale=was.scale,
            normed=was.normed,
            learned_scale=was.learned,
            capped=was.capped,
            rotated=was.sides,
            scores=scores.permute(order),
            weights=weights.permute(order),
            dim=order.index(dim % read.value.dim()),
            path=node.path,
            maps=was.maps,
        )
        self.trace.attentions.append(found)
        self.lineages[node.index] = Lineage(softmax=found)

    def _key_columns(self, read: Node) -> slice | None:
        """The columns of softmax's input that are scores of keys, where others were concatenated (attention sinks)."""
        node: Node | None = read
        while node is not None and node.op != "cat" and node.value.shape == read.value.shape:
            node = self._main(node)
        if node is None or node.op != "cat" or node.value.shape != read.value.shape:
            return None
        begin = 0
        for part in node.args[0]:
            end = begin + part.value.shape[-1]
            if self.of(part).product is not None and end - begin < read.value.shape[-1]:
                return slice(begin, end)
            begin = end
        return None
