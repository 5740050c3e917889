"""Record one forward of any PyTorch model as a graph of elementary operations.

Below autograd every PyTorch model consists of the same few operations: `linear`, fused attention, `einsum` and
`nn.MultiheadAttention` all arrive as matmuls, softmaxes and elementwise arithmetic. `record` runs a call at that level
and keeps each operation with its inputs, the path of the module that ran it and a copy of its output. The model needs
no hooks, names or base classes of its own. Every reader of this package works on this graph.

With `exact`, every float32 that the code requests explicitly becomes float64, as do new tensors: libraries write
float32 into their norms, softmaxes and rotary angles, and a comparison in float64 would otherwise stop there.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer.anatomy.softmaxes import fold_softmaxes
from glassformer.shapes import Int, Shaped

LAYOUT = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "clone", "contiguous", "unsqueeze", "squeeze",
    "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach", "_to_copy",
    "lift_fresh", "unflatten", "repeat", "copy", "movedim", "narrow", "_reshape_alias", "_reshape_copy", "index_select",
})  # fmt: skip
"""Operations that move numbers without changing them, from one tensor."""
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "matmul"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
SHAPE_ONLY = frozenset({
    "ones_like", "zeros_like", "empty_like", "full_like", "rand_like", "new_ones", "new_zeros", "new_full", "new_empty",
})  # fmt: skip
"""Operations whose output does not depend on the values of their input."""
OVERWRITTEN = "overwritten"
"""The operation of a node whose tensor was changed by writes to a view of it: the old tensor, then the writes."""


@dataclass(eq=False, repr=False)
class Node:
    """One tensor: the operation that computed it, its input tensors, and its value at that moment.

    `op` is the operation's ATen name without the underscore of an in-place variant. `args` and `kwargs` are those of
    the operation, with a Node in place of each tensor.
    """

    index: int
    op: str
    inputs: list["Node"]
    value: Shaped[Tensor, "..."]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    live: bool = False
    """Whether it depends on the tokens."""
    name: str = ""
    """The name of the parameter or buffer, for a leaf that is one."""
    path: str = ""
    """The path of the module that was running."""
    output: int = 0
    """Which output of the operation this is."""
    in_place: bool = False
    """Whether the operation wrote to one of its inputs."""
    storage: int = 0
    """Address of the tensor's storage, which all views of a parameter share."""
    storage_bytes: int = 0
    """Size of that storage; the tensor is a part of it if it is smaller."""
    users: list["Node"] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return one line without the inputs, which would print the whole graph."""
        return f"Node({self.index}, {self.op}, {tuple(self.value.shape)}{', ' + self.name if self.name else ''})"

    @property
    def is_product(self) -> bool:
        return self.op in MATMULS

    @cached_property
    def factors(self) -> list["Node"]:
        """The two operands of a product."""
        return self.inputs[1:3] if self.op in ("addmm", "baddbmm", "addmv") else self.inputs[:2]

    @property
    def bias(self) -> Tensor | None:
        """What a matmul adds to its result."""
        if self.op == "linear" and len(self.inputs) == 3:
            return self.inputs[2].value
        return self.inputs[0].value if self.op in ("addmm", "baddbmm") else None

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
    parameters: dict[int, str] = field(default_factory=dict)
    """Names of the model's parameters by the address of their storage."""

    def release(self) -> None:
        """Free the memory now: nodes and their users refer to one another, and their values to a model's weights."""
        for node in self.nodes:
            node.inputs, node.users, node.args, node.kwargs = [], [], (), {}
        self.nodes = []

    def is_parameter(self, node: Node) -> bool:
        """Return whether a node is a parameter of the model or a view of one."""
        return node.storage in self.parameters

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


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch's compiler out of a function, without importing it: that takes seconds, and most models need none."""
    kept: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not kept:
            kept.append(torch.compiler.disable(function))
        return kept[0](*args, **kwargs)

    return call


class _Mode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler at its first operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `_uncompiled` does what torch would do


class Widened(_Mode):
    """Every float32 asked for by name is float64."""

    @_uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(_widened(a) for a in args), **{k: _widened(v) for k, v in (kwargs or {}).items()})


class Recorder(_Mode):
    """Records every operation. `sources` are the tensors that count as tokens, `names` the model's own tensors."""

    def __init__(self, sources: Iterable[Tensor], names: dict[int, str], exact: bool):
        super().__init__()
        self.nodes: list[Node] = []
        self.held: list[Tensor] = []  # keeps tensors alive, so that no id() is reused
        self.latest: dict[int, Node] = {}
        self.versions: dict[int, int] = {}
        self.writes: dict[int, list[Node]] = {}
        """In-place operations by the storage they wrote to."""
        self.path = [""]
        self.names, self.exact = names, exact
        for source in sources:
            self._add(Node(0, "tokens", [], source, live=True), source)

    @_uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.exact:
            args = tuple(_widened(a) for a in args)
            kwargs = {k: _widened(v) for k, v in kwargs.items()}
        inputs = [self._node(t) for t in tensors_in((args, kwargs))]
        known = dict(zip(map(id, tensors_in((args, kwargs))), inputs, strict=True))
        given, named = _with_nodes(args, known), _with_nodes(kwargs, known)
        out = func(*args, **kwargs)
        op = str(func).split(".")[1]
        name = op.rstrip("_") if op.endswith("_") and not op.endswith("__") else op
        live = any(n.live for n in inputs) and name not in SHAPE_ONLY
        mutable = bool(func._schema.is_mutable)
        for i, tensor in enumerate(tensors_in(out)):
            in_place = mutable and id(tensor) in known
            node = Node(0, name, inputs, tensor, given, named, live, output=i, in_place=in_place)
            self._add(node, tensor)
            if in_place:
                self.writes.setdefault(node.storage, []).append(node)
        return out

    def _node(self, tensor: Tensor) -> Node:
        """Return the node that holds the tensor's present value."""
        node = self.latest.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        if node is not None and self.versions[id(tensor)] == version:
            return node
        # a write to a view changes this tensor too, without an operation that returns it
        since = -1 if node is None else node.index
        writes = [w for w in self.writes.get(storage_of(tensor), []) if w.index > since]
        before = [] if node is None else [node]
        if writes and (node is None or node.storage == storage_of(node.value) or not _same(node.value, tensor)):
            live = any(n.live for n in (*before, *writes))
            return self._add(Node(0, OVERWRITTEN, [*before, *writes], tensor, live=live), tensor)
        self.versions[id(tensor)] = version
        return node or self._add(Node(0, "leaf", [], tensor), tensor)

    def _add(self, node: Node, tensor: Tensor) -> Node:
        self.held.append(tensor)
        # on the CPU, where every reader works; there, a tensor that depends on the tokens is copied, because it may be
        # overwritten later, and weights are not
        node.value = tensor.detach().clone() if node.live and tensor.device.type == "cpu" else tensor.detach().cpu()
        node.index, node.path, node.storage = len(self.nodes), self.path[-1], storage_of(tensor)
        node.storage_bytes = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0
        node.name = self.names.get(id(tensor), "")
        for before in node.inputs:
            before.users.append(node)
        self.nodes.append(node)
        self.latest[id(tensor)] = node
        self.versions[id(tensor)] = 0 if tensor.is_inference() else tensor._version
        return node


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which all views of it share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _same(value: Tensor, tensor: Tensor) -> bool:
    return torch.equal(value, tensor.detach().to(value.device))


def _with_nodes(value: Any, known: dict[int, Node]) -> Any:
    """Return arguments with a Node in place of each tensor."""
    if isinstance(value, Tensor):
        return known[id(value)]
    if isinstance(value, dict):
        return {k: _with_nodes(v, known) for k, v in value.items()}
    return type(value)(_with_nodes(v, known) for v in value) if type(value) in (tuple, list) else value


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
    """Compute fused attention by its definition, without fast paths; with `exact`, in float64 by default."""
    fast, usual = torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_default_dtype(torch.float64 if exact else usual)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(usual)
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def module_paths(model: Any, stack: list[str]) -> Iterator[None]:
    """Keep the path of the module that is running on top of the stack."""
    handles = []

    def leave(module: nn.Module, given: Any, output: Any) -> None:
        stack.pop()

    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda m, a, name=name: stack.append(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(
    call: Callable[[], Any], sources: Iterable[Int[Tensor, "..."]], model: Any = None, exact: bool = True
) -> tuple[Graph, Any]:
    """Run `call` and return its graph and what it returned."""
    recorder = Recorder(sources, own_tensors(model), exact)
    with elementary(exact), module_paths(model, recorder.path), recorder:
        result = call()
    parameters = {storage_of(p): n for n, p in model.named_parameters()} if isinstance(model, nn.Module) else {}
    return Graph(fold_softmaxes(recorder.nodes), parameters), result
