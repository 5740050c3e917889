"""Why a parameter gets no gradient: this input does not reach it, or it is cut off.

A parameter that another input reaches is no fault: a longer one, one with special token ids, one with an optional
argument, or another output of the same call. So is one that only selects which positions are read (an indexer for
sparse attention): a selection has no derivative, and is trained by a loss of its own. What stays is cut off.
"""

import ast
import contextlib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.anatomy.record import SHAPE_ONLY, Graph, Node, record, tensors_in, walk
from glassformer.doctor.probes.norms import is_norm
from glassformer.doctor.subject.measure import gap, rms, same_shape_bound
from glassformer.doctor.subject.subject import Subject, layer_of

Explained = dict[str, str]
"""Parameter -> which input reaches it, or what it is for."""
LONGER = (129, 257)
"""Some parts only see long inputs: a compressor that pools 128 positions, a memory."""
COMBINATIONS = 24
"""Ways to fill a group of optional arguments that are tried at most."""


def explain(subject: Subject, dead: list[str]) -> Explained:
    """What reaches each of the parameters that a plain call does not; those that are cut off are missing."""
    found: Explained = {}
    for words, call in [("another output of the same call needs it", other_outputs), *_other_inputs(subject)]:
        left = [n for n in dead if n not in found]
        if not left:
            return found
        with contextlib.suppress(Exception, SystemExit):
            names = reached_by(subject, call, left)
            if call is other_outputs:  # what decides the logits must get a gradient from them
                names = [name for name in names if not _moves_logits(subject, name)]
            found |= dict.fromkeys(names, words)
    left = [n for n in dead if n not in found]
    if left:
        with contextlib.suppress(Exception):
            found |= _by_selection(subject, left)
        with contextlib.suppress(Exception):
            found |= _by_code(subject, [n for n in left if n not in found])
        with contextlib.suppress(Exception):
            found |= _by_part(subject, [n for n in left if n not in found])
    return found


Call = Callable[[Subject], list[Tensor]]


def reached_by(subject: Subject, call: Call, names: list[str]) -> list[str]:
    """Which parameters get a gradient from a random projection of what a call returns, with stirred weights."""
    with subject.isolated(own=True) as isolated, torch.enable_grad():
        assert isolated.module is not None
        generator = torch.Generator().manual_seed(11)
        wanted = {n: p for n, p in isolated.module.named_parameters() if n in names}
        with torch.no_grad():
            for parameter in isolated.module.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
        outputs = [t for t in call(isolated) if t.is_floating_point() and t.requires_grad]
        if not outputs:
            return []
        along = [(t * torch.randn(t.shape, generator=generator).to(t)).sum() for t in outputs]
        gradients = torch.autograd.grad(torch.stack(along).sum(), list(wanted.values()), allow_unused=True)
    return [n for n, g in zip(wanted, gradients, strict=True) if g is not None and bool((g != 0).any())]


def _moves_logits(subject: Subject, name: str) -> bool:
    """Whether other values of a parameter give other logits."""
    with subject.isolated(own=True) as isolated:
        assert isolated.module is not None
        before, parameter = isolated.logits(_tokens(isolated)), isolated.module.get_parameter(name)
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(12)).to(parameter)
        parameter.add_(noise * max(rms(parameter), 1e-3))
        return gap(isolated.logits(_tokens(isolated)), before) > same_shape_bound(before)


def other_outputs(isolated: Subject) -> list[Tensor]:
    """Every tensor that a plain call returns: a pooled vector, a second head, an auxiliary loss."""
    output = isolated.output(_tokens(isolated))
    return _tensors(output)


def _tensors(output: Any) -> list[Tensor]:
    return tensors_in(dict(output) if hasattr(output, "keys") else output)


def _tokens(isolated: Subject, length: int = 24) -> Tensor:
    return isolated.tokens(isolated.rows(3), isolated.length(length), seed=29)


def _other_inputs(subject: Subject) -> Iterator[tuple[str, Call]]:
    """Calls with other inputs, and how to name them."""
    yield "other tokens reach it", lambda s: [s.logits(s.tokens(s.rows(8), s.length(65), seed=30))]
    most = subject.facts.whole("max_len") or subject.limit
    for length in LONGER:
        if subject.length(24) < length <= most and not subject.large:
            yield f"an input of {length} tokens reaches it", _longer(length)
    if special := sorted(i for i in subject.special_ids() if i < subject.vocab_size):
        yield "special token ids reach it", _with_ids(special)
    yield from _arguments(subject)


def _longer(length: int) -> Call:
    return lambda s: [s.logits(s.tokens(1, length, seed=29))]


def _with_ids(ids: list[int]) -> Call:
    def call(isolated: Subject) -> list[Tensor]:
        tokens = _tokens(isolated)
        for i in range(tokens.shape[1] // 2):
            tokens[:, 2 * i] = ids[i % len(ids)]
        return [isolated.logits(tokens)]

    return call


def _arguments(subject: Subject) -> Iterator[tuple[str, Call]]:
    """Optional arguments of forward that a plain call leaves out, alone and with those of the same first word."""
    assert subject.module is not None
    face = subject.interface
    taken = {face.tokens, face.target, face.cache, face.labels, face.use_cache}
    names = [
        name
        for name, parameter in inspect.signature(subject.module.forward).parameters.items()
        if parameter.default is None and name not in taken
    ]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.split("_")[0], []).append(name)
    for group in [*([name] for name in names), *(g for g in groups.values() if len(g) > 1)]:
        shown = ", ".join(f"{name}=" for name in group)
        ways = itertools.product(*(_values(name) for name in group))
        for way in itertools.islice(ways, COMBINATIONS):
            yield f"only {shown} brings it in", _with_arguments(dict(zip(group, way, strict=True)))


Value = Callable[[Subject, Tensor], Tensor]


def _values(name: str) -> list[Value]:
    """What an optional argument may want, by its name: ids, a mask, vectors, a square matrix."""

    def ids(s: Subject, t: Tensor) -> Tensor:
        return (t + torch.arange(t.shape[1], device=t.device)) % 2

    def square_ids(s: Subject, t: Tensor) -> Tensor:
        return torch.arange(t.shape[1], device=t.device).expand(*t.shape, -1).contiguous()

    def ones(s: Subject, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def vectors(s: Subject, t: Tensor) -> Tensor:
        width = s.facts.whole("d_model") or 1
        return torch.randn(*t.shape, width, generator=torch.Generator().manual_seed(7)).to(t.device, s.dtype)

    def square(s: Subject, t: Tensor) -> Tensor:
        return torch.eye(t.shape[1], device=t.device, dtype=s.dtype).expand(len(t), -1, -1).contiguous()

    if name.endswith(("_ids", "_id", "_positions")):
        return [ids, square_ids]
    if "mask" in name:
        return [ones]
    if name.endswith(("_embeds", "_states", "_features", "_values", "_outputs")):
        return [vectors]
    return [square, vectors, ids]


def _with_arguments(values: dict[str, Value]) -> Call:
    def call(isolated: Subject) -> list[Tensor]:
        tokens, given = _tokens(isolated), dict[str, Any]()
        source = isolated.source(len(tokens)) if isolated.kind == "seq2seq" else None
        for name, make in values.items():
            of_source = source is not None and not name.startswith(("decoder", "tgt", "target"))
            given[name] = make(isolated, source if of_source and source is not None else tokens)
        if source is not None:
            given["source"] = source
        return _tensors(isolated.output(tokens, **given))

    return call


def _recorded(subject: Subject) -> tuple[Graph, Node | None]:
    """The graph of a plain call and the node of its logits."""
    with subject.isolated() as isolated:
        tokens = _tokens(isolated)
        given = {"source": isolated.source(len(tokens))} if isolated.kind == "seq2seq" else {}
        sources = [tokens, *given.values()]
        graph, logits = record(lambda: isolated.logits(tokens, **given), sources, isolated.model, exact=False)
    logits = logits.cpu()  # as the recorded values are
    same = (n for n in reversed(graph.nodes) if n.value.shape == logits.shape and torch.equal(n.value, logits))
    return graph, next(same, None)


def _by_selection(subject: Subject, names: list[str]) -> Explained:
    """Parameters that reach the logits through a selection of positions by top-k, and in no other way."""
    graph, logits = _recorded(subject)
    if logits is None:
        return {}
    found = {}
    for name in names:
        leaves = [n for n in graph.nodes if n.name == name]
        passed = list(walk(leaves, _onward))
        ends = [n for n in passed if not n.value.is_floating_point()]
        if any(n is logits for n in passed) or not ends:
            continue
        if all(n.op == "topk" for n in ends) and any(_over_positions(n, subject) for n in ends):
            found[name] = "it selects positions by top-k, which has no derivative: it needs a loss of its own"
    return found


def _onward(node: Node) -> list[Node]:
    """What is computed from a node's numbers: nothing behind a choice, and not what only takes its shape."""
    return [n for n in node.users if n.op not in SHAPE_ONLY] if node.value.is_floating_point() else []


def _over_positions(node: Node, subject: Subject) -> bool:
    """Whether a top-k runs over positions or blocks of them: an axis that another one of its input does not bound."""
    axis = int(node.args[2]) if len(node.args) > 2 else int(node.kwargs.get("dim", -1))
    size = node.args[0].value.shape[axis]
    experts = {v for k, v in subject.facts.raw.items() if "expert" in k and isinstance(v, int)}
    return size <= subject.length(24) and size not in experts


def _by_code(subject: Subject, names: list[str]) -> Explained:
    """Modules that code calls which did not run: another method, or a branch that an optional argument decides."""
    module = subject.module
    assert module is not None
    graph, _ = _recorded(subject)
    used = {n.name for n in graph.nodes if n.name}
    ran = _code_that_runs(subject)
    found: Explained = {}
    for name in names:
        at = _unused_root(module, name, used)
        if at is None:
            continue
        path, child = at
        above, _, attribute = path.rpartition(".")
        parent = module.get_submodule(above)
        outside = layer_of(path, subject.blocks()) is None and not is_norm(child) and not _is_table(child, subject)
        for function, under in _uses(type(parent), attribute):
            if under or (outside and function.__code__ not in ran):
                what = f"only {under}= brings it in" if under else f"only {function.__qualname__} uses it"
                found[name] = what
                break
    return found


def _is_table(child: nn.Module, subject: Subject) -> bool:
    """A table with one row per position."""
    length = subject.facts.whole("max_len")
    rows = [m.num_embeddings for m in child.modules() if isinstance(m, nn.Embedding)]
    return length is not None and any(0 <= n - length <= 4 for n in rows)


def _unused_root(module: nn.Module, name: str, used: set[str]) -> tuple[str, nn.Module] | None:
    """The largest module around a parameter of which nothing was used, with its path."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        path = ".".join(parts[:depth])
        if not any(u.startswith(path + ".") for u in used):
            return path, module.get_submodule(path)
    return None


def _uses(cls: type, attribute: str) -> Iterator[tuple[Any, str]]:
    """Methods of a class that read an attribute of `self`, each with the optional argument that decides it, or ""."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name, None)
        function = inspect.unwrap(function) if inspect.isfunction(function) else None
        if function is None or name.startswith(("__", "_init", "_set", "set_")):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            continue
        arguments = tree.body[0].args if isinstance(tree.body[0], ast.FunctionDef) else None
        optional = _optional(arguments) if arguments is not None else set()
        for under in _reads(tree, attribute, optional, ""):
            yield function, under


def _optional(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args]
    with_default = every[len(every) - len(arguments.defaults) :] if arguments.defaults else []
    pairs = [*zip(with_default, arguments.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return {a.arg for a, d in pairs if isinstance(d, ast.Constant) and d.value in (None, False)}


def _reads(node: ast.AST, attribute: str, optional: set[str], under: str) -> Iterator[str]:
    """For each place that reads `self.<attribute>`: the optional argument whose test encloses it, or "".

    A method that only returns the attribute does not use it.
    """
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Attribute) and node.value.attr == attribute:
        return
    if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load):
        yield under
    if isinstance(node, ast.If | ast.IfExp):
        named = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} & optional
        inner = under or next(iter(sorted(named)), "")
        yield from _reads(node.test, attribute, optional, under)
        branches: list[ast.AST] = []
        for part in (node.body, node.orelse):
            branches += part if isinstance(part, list) else [part]
        for branch in branches:
            yield from _reads(branch, attribute, optional, inner)
        return
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, attribute, optional, under)


def _by_part(subject: Subject, names: list[str]) -> Explained:
    """Parameters outside the layers whose result a part of the model returns and the whole leaves out: a pooler."""
    candidates = [n for n in names if layer_of(n, subject.blocks()) is None]
    found: Explained = {}

    def call(isolated: Subject) -> list[Tensor]:
        assert isolated.module is not None
        returned: list[Tensor] = []
        handles = [
            m.register_forward_hook(lambda m, a, output: returned.extend(_several(output)))
            for name, m in isolated.module.named_modules()
            if layer_of(name, isolated.blocks()) is None
        ]
        try:
            isolated.logits(_tokens(isolated))
        finally:
            for handle in handles:
                handle.remove()
        return returned

    if candidates:
        words = "a part of the model returns its result, and this model leaves it out"
        found = dict.fromkeys(reached_by(subject, call, candidates), words)
    return found


def _several(output: Any) -> list[Tensor]:
    """The tensors of an output that holds more than one."""
    tensors = _tensors(output)
    return tensors if len(tensors) > 1 else []


def _code_that_runs(subject: Subject) -> set[CodeType]:
    """The code of every Python function that a plain call runs."""
    ran: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        ran.add(frame.f_code)

    before = sys.getprofile()
    with subject.isolated() as isolated:
        tokens = _tokens(isolated, 8)
        sys.setprofile(note)
        try:
            isolated.logits(tokens)
        finally:
            sys.setprofile(before)
    return ran
