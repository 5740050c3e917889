"""What attention really computes, read off the operations of one forward, in PyTorch of any style.

A dispatch mode sees every operation below modules, functions and `einsum`; fused attention takes its plain path.
Each tensor carries its lineage: the scalar factors since its projection, the product q·k it came from, the softmax, the
linear map. From that follow, per attention: scale, softmax axis, masked places and their value, q, k and v.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer.doctor.subject.subject import Subject

VIEWS = frozenset([
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "select",
    "slice", "split", "split_with_sizes", "chunk", "unbind", "alias", "clone", "_to_copy", "contiguous", "detach",
    "narrow", "as_strided", "repeat", "index_select", "_reshape_alias", "_reshape_copy", "cat", "stack", "unfold",
    "flip", "lift_fresh", "view_as_complex", "view_as_real", "index", "movedim",
])  # fmt: skip
KEEP = frozenset([
    "add", "sub", "add_", "sub_", "rsub", "masked_fill", "masked_fill_", "where", "neg", "maximum", "minimum",
    "clamp", "clamp_", "tril", "triu", "bernoulli", "native_dropout", "dropout", "relu_", "copy_", "index_put",
    "index_put_", "index_copy", "scatter", "roll", "constant_pad_nd", "nan_to_num",
])  # fmt: skip
INVERSE = frozenset(["rsqrt", "sqrt", "reciprocal", "linalg_vector_norm", "norm", "exp", "clamp_min"])
SOFTMAX = frozenset(("_softmax", "_safe_softmax", "softmax"))
PRODUCTS = frozenset(("mm", "addmm", "linear", "bmm", "baddbmm", "matmul"))
LEAVES_WEIGHTS = frozenset([
    "masked_fill", "masked_fill_", "where", "tril", "triu", "native_dropout", "dropout", "bernoulli", "nan_to_num",
    "copy_", "constant_pad_nd",
])  # fmt: skip
"""Operations on attention weights that keep a weight or set it to a constant."""
FORBIDDEN = -1e30
"""Below this a softmax input is masked whatever the scores are; nearer values are judged by distance."""


@dataclass
class Linear:
    """One linear map: the parameter, its input and output, and where it was called."""

    weight: int
    input: Tensor
    output: Tensor
    path: str


@dataclass
class Attention:
    """One softmax over products q·k, as it was computed. Tensors keep the layout of the call: scores (..., T, S)."""

    q: Tensor
    k: Tensor
    scale: float
    normed: bool
    learned_scale: bool
    capped: bool
    turned: tuple[bool, bool]
    """Whether q and k were multiplied component by component since their projection (a rotation; not a norm)."""
    scores: Tensor
    weights: Tensor
    dim: int
    path: str
    v: Tensor | None = None
    out: Tensor | None = None
    contracted: Tensor | None = None
    """The weights as the second product read them: (N, T, S), summing to 1 over the last axis."""
    merged: Tensor | None = None
    """What the next linear map read, if only views lie between."""
    maps: frozenset[int] = frozenset()
    """Storages of the linear maps that q and k come from."""
    changes: tuple[str, ...] = ()
    """Operations on the weights between softmax and the product with the values, other than views and factors."""
    mixed: bool = False
    """Whether other tensors than the weights themselves took part in them."""
    v_maps: frozenset[int] = frozenset()
    """Storages of the linear maps that v comes from."""
    v_linear: Tensor | None = None
    """Output of the linear map that v is a view of, if only views lie between."""

    def pattern(self, rows: int) -> Tensor | None:
        """Softmax inputs as (B, H, T, S), None when the layout is not one of the usual ones."""
        return as_heads(self.scores, rows)


@dataclass
class Lineage:
    scale: float = 1.0
    product: tuple[Tensor, Tensor] | None = None
    normed: bool = False
    learned: bool = False
    capped: bool = False
    inverse: bool = False
    turned: bool = False
    sides: tuple[bool, bool] = (False, False)
    softmax: Attention | None = None
    heads: Attention | None = None
    linear: Linear | None = None
    maps: frozenset[int] = frozenset()
    changes: tuple[str, ...] = ()
    mixed: bool = False
    total: Attention | None = None
    """Of a sum or another reduction of attention weights: whose."""


@dataclass
class Trace:
    """Everything seen in one forward, in order."""

    attentions: list[Attention] = field(default_factory=list)
    linears: list[Linear] = field(default_factory=list)
    activations: list[tuple[str, str]] = field(default_factory=list)
    """(path, operation) of named activation calls."""
    lookups: list[tuple[int, int, Tensor, str]] = field(default_factory=list)
    """(storage of the table, its rows, indices, path)."""
    reductions: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """(path, operation, shape, axes) of means, variances and norms over a stream."""
    logits: Tensor | None = None


def as_heads(scores: Tensor, rows: int) -> Tensor | None:
    """(B,H,T,S) from (B,H,T,S), (B·H,T,S) or (B,T,S)."""
    if scores.dim() == 4 and scores.shape[0] == rows:
        return scores
    if scores.dim() == 3 and scores.shape[0] % rows == 0:
        return scores.reshape(rows, scores.shape[0] // rows, *scores.shape[1:])
    if scores.dim() == 5 and scores.shape[0] == rows:  # grouped: (B,G,H/G,T,S)
        return scores.flatten(1, 2)
    if scores.dim() == 5 and scores.shape[1] == rows and scores.shape[0] == scores.shape[-1]:  # (T,B,G,H/G,S)
        return scores.permute(1, 2, 3, 0, 4).flatten(1, 2)
    return None


class _Recorder(TorchDispatchMode):
    def __init__(self, model: Any):
        super().__init__()
        self.trace = Trace()
        self.path: list[str] = [""]
        self.info: dict[int, Lineage] = {}
        self.kept: list[Any] = []
        self.storages: dict[int, str] = {}
        if isinstance(model, nn.Module):
            self.storages = {p.untyped_storage().data_ptr(): n for n, p in model.named_parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.kept.append((args, out))  # ids stay unique while the tensors live
        name = func._schema.name.removeprefix("aten::")
        with contextlib.suppress(RuntimeError, IndexError):
            self._see(name, args, kwargs, out)
        return out

    def of(self, tensor: Any) -> Lineage:
        return self.info.get(id(tensor), Lineage()) if isinstance(tensor, Tensor) else Lineage()

    def is_parameter(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages

    def _see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if name == "index_select" and args[0].dim() == 2 and args[1] == 0:
            table = args[0]
            self.trace.lookups.append((table.untyped_storage().data_ptr(), len(table), args[2].clone(), self.path[-1]))
        if name in VIEWS:
            self._view(args, out)
        elif name not in PRODUCTS and self._after_softmax(name, args, out):
            pass
        elif name in ("mul", "div", "mul_", "div_"):
            self._factor(name, args, out)
        elif name in ("mm", "addmm", "linear"):
            self._linear(name, args, out)
        elif name in ("bmm", "baddbmm", "matmul"):
            self._product(name, args, kwargs, out)
        elif name in SOFTMAX:
            self._softmax(args, out)
        elif name in KEEP:
            self._keep(name, args, out)
        elif name == "tanh":
            self.info[id(out)] = replace(self.of(args[0]), capped=True, linear=None, heads=None)
            self.trace.activations.append((self.path[-1], "tanh"))
        elif name in ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"):
            self.info[id(out[0])] = Lineage(normed=True, maps=self.of(args[0]).maps)
            if name != "native_batch_norm":
                axes = tuple(range(-len(args[1]), 0)) if isinstance(args[1], list) else ()
                self.trace.reductions.append((self.path[-1], name, tuple(args[0].shape), axes))
        elif name in INVERSE:
            self.info[id(out)] = Lineage(inverse=True)
        elif name in ("mean", "var", "std", "var_mean", "sum") and len(args) > 1 and isinstance(args[1], list):
            axes = tuple(a - args[0].dim() if a >= 0 else a for a in args[1])
            self.trace.reductions.append((self.path[-1], name, tuple(args[0].shape), axes))
            first = out[0] if isinstance(out, tuple) else out
            self.info[id(first)] = Lineage()
        elif name in ("gelu", "silu", "relu", "relu_", "sigmoid", "mish", "elu", "hardswish"):
            how = kwargs.get("approximate", args[1] if len(args) > 1 else "none") if name == "gelu" else ""
            self.trace.activations.append((self.path[-1], f"gelu_{how}" if how == "tanh" else name))
        elif name == "embedding":
            table, indices = args[0], args[1]
            entry = (table.untyped_storage().data_ptr(), int(table.shape[0]), indices.clone(), self.path[-1])
            self.trace.lookups.append(entry)

    def _after_softmax(self, name: str, args: tuple[Any, ...], out: Any) -> bool:
        """Follow attention weights to the product with the values; False where no operand is one."""
        main = next((a for a in args if isinstance(a, Tensor) and self.of(a).softmax is not None), None)
        first = out[0] if isinstance(out, tuple) else out
        if main is None or not isinstance(first, Tensor):
            return False
        was = self.of(main)
        if first.shape != main.shape:
            self.info[id(first)] = Lineage(total=was.softmax)
            return True
        others = [self.of(a) for a in args if isinstance(a, Tensor) and a is not main and a.numel() > 1]
        foreign = any(o.softmax is not was.softmax and o.total is not was.softmax for o in others)
        learned = any(isinstance(a, Tensor) and self.is_parameter(a) for a in args)
        factor = name in ("mul", "mul_", "div", "div_") and not others and args[0] is not args[1]
        if name in LEAVES_WEIGHTS or factor:
            self.info[id(first)] = replace(was, heads=None)
        else:
            step = "softmax" if name in SOFTMAX else name.rstrip("_")
            mixed = was.mixed or foreign or learned
            self.info[id(first)] = replace(was, changes=(*was.changes, step), mixed=mixed, heads=None)
        return True

    def _view(self, args: tuple[Any, ...], out: Any) -> None:
        source = args[0]
        if isinstance(source, list | tuple):
            known = [t for t in source if isinstance(t, Tensor) and id(t) in self.info]
            source = known[-1] if known else source[0]
        if id(source) in self.info:
            for item in out if isinstance(out, list | tuple) else [out]:
                self.info[id(item)] = self.info[id(source)]

    def _main(self, args: tuple[Any, ...]) -> Tensor | None:
        """Of the operands, the one whose lineage goes on: the one that carries scores, else the largest known one."""
        known = [a for a in args if isinstance(a, Tensor) and id(a) in self.info]
        known.sort(key=lambda t: (self.of(t).product is not None or self.of(t).softmax is not None, t.numel()))
        return known[-1] if known else None

    def _keep(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        main = self._main(args)
        first = out[0] if isinstance(out, tuple) else out
        if main is None or not isinstance(first, Tensor):
            return
        was = self.of(main)
        other = next((a for a in args[:2] if isinstance(a, Tensor) and a is not main), None)
        bias = name in ("add", "add_") and other is not None and self.is_parameter(other) and other.dim() == 1
        if bias and was.linear is not None:
            was.linear.output = first
            self.info[id(first)] = was
            return
        self.info[id(first)] = replace(was, linear=None, heads=None)

    def _factor(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        main = self._main(args)
        if main is None:  # of unknown origin: a number is a factor all the same
            plain = [a for a in args[:2] if isinstance(a, Tensor) and a.numel() > 1]
            if len(plain) != 1:
                return
            main = plain[0]
        was = replace(self.of(main), linear=None, heads=None)
        other = args[1] if args[0] is main else args[0]
        divides = name.startswith("div")
        if isinstance(other, int | float) or (isinstance(other, Tensor) and other.numel() == 1):
            value = float(other)
            learned = was.learned or (isinstance(other, Tensor) and self.is_parameter(other))
            if value != 0:
                self.info[id(out)] = replace(
                    was, scale=was.scale / value if divides else was.scale * value, learned=learned
                )
            return
        normed = was.normed or self.of(other).inverse
        gain = self.of(other).inverse or (isinstance(other, Tensor) and self.is_parameter(other))
        per_head = isinstance(other, Tensor) and was.product is not None and other.numel() <= 64 and other.numel() > 1
        turned = was.turned or not gain
        self.info[id(out)] = replace(was, normed=normed, learned=was.learned or per_head, turned=turned)

    def _linear(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        left, right = (args[1], args[2]) if name == "addmm" else (args[0], args[1])
        parameter = right if self.is_parameter(right) else left if self.is_parameter(left) else None
        if parameter is None:  # a product of two activations without a batch axis
            self._product(name, args, {}, out)
            return
        read = left if parameter is right else right
        record = Linear(parameter.untyped_storage().data_ptr(), read, out, self.path[-1])
        self.trace.linears.append(record)
        heads = self.of(read).heads
        if heads is not None and heads.merged is None:
            heads.merged = read
        self.info[id(out)] = Lineage(linear=record, maps=frozenset([record.weight]))

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        left, right = (args[1], args[2]) if name in ("baddbmm", "addmm") else (args[0], args[1])
        if self.is_parameter(left) or self.is_parameter(right):
            weight = left if self.is_parameter(left) else right
            self.info[id(out)] = Lineage(maps=frozenset([weight.untyped_storage().data_ptr()]))
            return
        a, b = self.of(left), self.of(right)
        if a.softmax is not None or b.softmax is not None:
            attention = a.softmax or b.softmax
            assert attention is not None
            if attention.out is None:
                v, w = (b, a) if a.softmax is not None else (a, b)
                attention.changes, attention.mixed, attention.v_maps = w.changes, w.mixed, v.maps
                attention.out, attention.v = out, right if a.softmax is not None else left
                attention.contracted = left if a.softmax is not None else right.transpose(-1, -2)
                attention.v_linear = v.linear.output if v.linear is not None else None
            self.info[id(out)] = Lineage(heads=attention)
            return
        alpha = kwargs.get("alpha", 1) if name == "baddbmm" else 1
        normed, learned = a.normed or b.normed, a.learned or b.learned
        self.info[id(out)] = Lineage(
            a.scale * b.scale * float(alpha),
            *((left, right), normed, learned),
            sides=(a.turned, b.turned),
            maps=a.maps | b.maps,
        )

    def _softmax(self, args: tuple[Any, ...], out: Tensor) -> None:
        read, dim = args[0], int(args[1])
        was = self.of(read)
        if was.product is None:
            self.info[id(out)] = Lineage()
            return
        q, k = was.product
        seen = Attention(
            *(q, k, was.scale, was.normed, was.learned, was.capped, was.sides),
            *(read.clone(), out, dim % read.dim(), self.path[-1]),
            maps=was.maps,
        )
        self.trace.attentions.append(seen)
        self.info[id(out)] = Lineage(softmax=seen)


@contextlib.contextmanager
def _paths(model: Any, stack: list[str]) -> Iterator[None]:
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


def trace_call(patient: Subject, tokens: Tensor, **given: Any) -> Trace:
    """Run one call of a patient and record it. The patient is a copy: see `Subject.patient`."""
    recorder = _Recorder(patient.model)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), _paths(patient.model, recorder.path), sdpa_kernel([SDPBackend.MATH]), recorder:
            logits, _ = patient.call(tokens, **given)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    recorder.trace.logits = logits
    return recorder.trace


def hidden_keys(scores: Tensor) -> Tensor:
    """Which places of a softmax input are masked: -inf, the least number of the type, or 5,000 below the row's largest.

    Scores of correct models lie within some hundreds of one another; -1e4 and -1e9 are mask constants.
    """
    top = scores.amax(dim=-1, keepdim=True)
    return (scores <= FORBIDDEN) | (scores < top - 5000)
