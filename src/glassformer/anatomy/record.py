"""A forward as a graph of elementary operations, whoever wrote the model.

Below autograd every PyTorch program is the same few operations: `linear`, fused attention, `einsum` and
`nn.MultiheadAttention` all arrive as matrix products, softmaxes and elementwise arithmetic. `record` runs a call there
and keeps each operation with its inputs and a copy of its output. Nothing has to be hooked, named or subclassed.

With `exact`, every float32 that the code asks for by name becomes float64, as do new tensors: libraries write float32
into their norms, softmaxes and rotary angles, and a comparison in float64 would stop there.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer.shapes import Int, Shaped

LAYOUT = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "clone", "contiguous", "unsqueeze", "squeeze",
    "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach", "_to_copy",
    "lift_fresh", "unflatten", "repeat", "copy", "movedim", "_reshape_alias", "index_select",
})  # fmt: skip
"""Operations that move numbers and do not change them."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax"})
SHAPE_ONLY = frozenset({
    "ones_like", "zeros_like", "empty_like", "full_like", "rand_like", "new_ones", "new_zeros", "new_full", "new_empty",
})  # fmt: skip
"""Operations whose output says nothing about the values of their input."""


@dataclass(eq=False, repr=False)
class Node:
    """One tensor: the operation that made it, from which other tensors, and its value at that moment."""

    index: int
    op: str
    inputs: list["Node"]
    value: Shaped[Tensor, "..."]
    arguments: tuple[Any, ...] = ()
    live: bool = False
    """Whether it depends on the tokens."""
    name: str = ""
    """The parameter's or buffer's name, of a leaf that is one."""
    users: list["Node"] = field(default_factory=list)

    def __repr__(self) -> str:
        """Its own line only: with its inputs it would be the whole graph."""
        return f"Node({self.index}, {self.op}, {tuple(self.value.shape)}{', ' + self.name if self.name else ''})"

    @property
    def is_product(self) -> bool:
        return self.op in PRODUCTS

    @cached_property
    def factors(self) -> list["Node"]:
        """The two operands of a product."""
        return self.inputs[1:3] if self.op in ("addmm", "baddbmm", "addmv") else self.inputs[:2]

    @cached_property
    def is_linear(self) -> bool:
        """A product of something that depends on the tokens with something that does not."""
        return self.is_product and len(self.factors) == 2 and self.factors[0].live != self.factors[1].live

    @cached_property
    def is_mixing(self) -> bool:
        """A product of two things that both depend on the tokens: attention."""
        return self.is_product and len(self.factors) == 2 and self.factors[0].live and self.factors[1].live

    @property
    def is_landmark(self) -> bool:
        return self.is_linear or self.is_mixing or (self.op == "embedding" and self.live)


@dataclass
class Graph:
    """All nodes of one call, in the order of computation."""

    nodes: list[Node]

    def landmarks_before(self, node: Node) -> set[Node]:
        """The nearest products and embeddings that a node is computed from."""
        found: set[Node] = set()
        for before in walk(node.inputs, lambda n: [] if n.is_landmark else n.inputs):
            if before.is_landmark:
                found.add(before)
        return found

    def since_landmark(self, node: Node) -> set[int]:
        """Indices of what a node is computed from without another product or embedding in between."""
        return {n.index for n in walk(node.inputs, lambda n: [] if n.is_landmark else n.inputs)}

    def changes(self, start: Node, end: Node) -> tuple[str, ...]:
        """Operations on the way from one node to another that change numbers, in order; products end the way."""
        used = ancestors(end)
        way = walk([start], lambda n: [m for m in n.users if m.index in used and not m.is_landmark])
        inside = [n for n in sorted(way, key=lambda n: n.index) if n is not start and n.op not in LAYOUT]
        return tuple(n.op.strip("_") for n in inside)

    def operations(self) -> Counter[str]:
        """How often each operation that changes numbers is computed from the tokens."""
        return Counter(n.op.strip("_") for n in self.nodes if n.live and n.inputs and n.op not in LAYOUT)

    def after(self, node: Node, wanted: Callable[[Node], bool], stop: Callable[[Node], bool]) -> Node | None:
        """The first node computed from this one that is wanted, not looking beyond nodes that stop."""
        met = walk(node.users, lambda n: [] if stop(n) or wanted(n) else n.users)
        return min((n for n in met if wanted(n)), key=lambda n: n.index, default=None)


def walk(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Every node reached, once, in no order that matters."""
    seen: set[int] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node.index not in seen:
            seen.add(node.index)
            yield node
            waiting += step(node)


def ancestors(node: Node) -> set[int]:
    """Indices of everything a node is computed from, itself included."""
    return {n.index for n in walk([node], lambda n: n.inputs)}


class Widened(TorchDispatchMode):
    """Every float32 asked for by name is float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(_widened(a) for a in args), **{k: _widened(v) for k, v in (kwargs or {}).items()})


class Recorder(TorchDispatchMode):
    """Keeps what passes. `sources` are the tensors that count as tokens, `names` the model's own tensors."""

    def __init__(self, sources: Iterable[Tensor], names: dict[int, str], exact: bool):
        super().__init__()
        self.nodes: list[Node] = []
        self.held: list[Tensor] = []  # kept alive, so that no identity is given out twice
        self.latest: dict[int, Node] = {}
        self.names, self.exact = names, exact
        for source in sources:
            self._add("tokens", [], source, (), live=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.exact:
            args = tuple(_widened(a) for a in args)
            kwargs = {k: _widened(v) for k, v in kwargs.items()}
        given = [self._node(t) for t in tensors_in((args, kwargs))]
        out = func(*args, **kwargs)
        op = str(func).split(".")[1]
        mutated = op.endswith("_") and not op.endswith("__")
        name = op.rstrip("_") if mutated else op
        live = any(n.live for n in given) and name not in SHAPE_ONLY
        plain = tuple(a for a in args if not isinstance(a, Tensor))
        for tensor in tensors_in(out):
            self._add(name, given, tensor, plain, live)
        return out

    def _node(self, tensor: Tensor) -> Node:
        return self.latest.get(id(tensor)) or self._add("leaf", [], tensor, (), live=False)

    def _add(self, op: str, inputs: list[Node], tensor: Tensor, arguments: tuple[Any, ...], live: bool) -> Node:
        self.held.append(tensor)
        # what depends on the tokens may be overwritten later; weights are not, and are not worth a copy
        value = tensor.detach().clone() if live and tensor.is_floating_point() else tensor.detach()
        node = Node(len(self.nodes), op, inputs, value, arguments, live, self.names.get(id(tensor), ""))
        for before in inputs:
            before.users.append(node)
        self.nodes.append(node)
        self.latest[id(tensor)] = node
        return node


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in a nest of tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, tuple | list) else []


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def own_tensors(model: Any) -> dict[int, str]:
    """Identity of each parameter and buffer, and its name."""
    if not isinstance(model, nn.Module):
        return {}
    return {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}


@contextlib.contextmanager
def elementary(exact: bool) -> Iterator[None]:
    """Fused attention as its definition, no fast paths; with `exact`, float64 where nothing else is asked for."""
    fast, usual = torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_default_dtype(torch.float64 if exact else usual)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(usual)
        torch.backends.mha.set_fastpath_enabled(fast)


def record(
    call: Callable[[], Any], sources: Iterable[Int[Tensor, "..."]], model: Any = None, exact: bool = True
) -> tuple[Graph, Any]:
    """Run `call` and return its graph and what it returned."""
    with elementary(exact), Recorder(sources, own_tensors(model), exact) as recorder:
        result = call()
    return Graph(recorder.nodes), result
