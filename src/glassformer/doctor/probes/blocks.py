"""How a block is wired: what is added to the stream and where norms stand, by fitting its output from its parts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.doctor.probes.norms import is_norm
from glassformer.doctor.subject.measure import gap, rms
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.finding import Finding, Verdict

FIT = 1e-4
"""Relative residual below which a sum is the block's output; wrong sums leave tenths."""
GROWTH = (0.5, 1.9)
"""Fresh pre-norm blocks grow the stream by 1.00 to 1.09 at usual widths."""


@dataclass
class Block:
    """One call of a block: the stream before and after, and what its parts read and gave, by name."""

    name: str
    before: Tensor
    after: Tensor
    parts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    norms: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    read: list[Tensor] = field(default_factory=list)
    """What any part read, whatever the shape of what it gave."""
    normed: bool = False
    """A part ends in a norm of its own, so that what it gives may be the stream already."""
    entangled: bool = False
    """A part is given a second stream and may add it itself: sums then say nothing."""
    located: bool = False
    """The block returns a tensor of the shape of the one it reads: the residual stream."""


def _tensor(value: Any, shape: torch.Size | None = None) -> Tensor | None:
    items = (
        list(value) if isinstance(value, tuple | list) else list(value.values()) if isinstance(value, dict) else [value]
    )
    for item in items:
        fits = isinstance(item, Tensor) and item.dim() == 3 and item.is_floating_point()
        if fits and (shape is None or item.shape == shape):
            return item
    return None


def _takes_two(values: list[Any], shape: torch.Size) -> bool:
    """Whether a part is given a second tensor of the stream's shape, or the stream next to its main input."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 3]
    streams = [v for v in tensors if v.shape == shape]
    different = any(a is not streams[0] and not torch.equal(a, streams[0]) for a in streams[1:])
    return different or (bool(streams) and tensors[0].shape != shape and tensors[0].shape[:2] == shape[:2])


def watch_blocks(isolated: Subject, length: int = 9) -> list[Block]:
    """Run once with hooks on each block, its norms, and its parts (children that keep the stream's shape)."""
    calls: dict[str, Block] = {}
    handles = []
    for name, block in isolated.blocks().items():

        def enter(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            stream = _tensor([*args, *kwargs.values()])
            if stream is not None:
                calls[name] = Block(name, stream.detach().clone(), stream)

        def leave(m: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if name in calls:
                after = _tensor(output, calls[name].before.shape)
                calls[name].located = after is not None
                calls[name].after = calls[name].before if after is None else after.detach().clone()

        handles += [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
        for part_name, part in _parts(block):

            def kept(
                m: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name, part: str = part_name
            ) -> None:
                given, out = _tensor([*args, *kwargs.values()]), _tensor(output)
                if name in calls and given is not None and not is_norm(m):
                    calls[name].read.append(given.detach())
                if name in calls and given is not None and out is not None and out.shape == calls[name].before.shape:
                    where = calls[name].norms if is_norm(m) else calls[name].parts
                    where[part] = (given.detach().clone(), out.detach().clone())
                    calls[name].normed |= not is_norm(m) and any(is_norm(inner) for inner in m.modules())
                    calls[name].entangled |= _takes_two([*args, *kwargs.values()], out.shape)

            handles.append(part.register_forward_hook(kept, with_kwargs=True))
    try:
        isolated.logits(isolated.tokens(2, isolated.length(length), seed=15))
    finally:
        for handle in handles:
            handle.remove()
    return [b for b in calls.values() if b.located]


def whole_layers(isolated: Subject, blocks: list[Block]) -> list[Block]:
    """Blocks of which each reads what the one before gave: modules that hold only a part of a layer do not."""
    stacks: dict[str, list[Block]] = {}
    for block in blocks:
        at = layer_of(block.name, isolated.blocks())
        stacks.setdefault(at[0] if at else "", []).append(block)
    found = []
    for stack in stacks.values():
        if all(gap(a.after, b.before) <= 1e-5 * max(rms(a.after), 1e-30) for a, b in pairwise(stack)):
            found += stack
    return found


def _parts(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children of a block; a mere container (ModuleList, or a sublayer that wraps its own norm) is opened."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in block.named_children():
        opened = isinstance(child, nn.ModuleList | nn.ModuleDict) or any(is_norm(c) for c in child.children())
        if opened and not _is_attention(child):
            found += [(f"{name}.{inner}", c) for inner, c in _parts(child)]
        elif not isinstance(child, nn.Dropout | nn.Identity):
            found.append((name, child))
    return found


def _is_attention(module: nn.Module) -> bool:
    """A module that holds q and k norms is no container of sublayers."""
    return any(
        any(w in n.lower() for w in ("q_norm", "k_norm", "q_layernorm", "qk", "query_norm"))
        for n, _ in module.named_children()
    )


def fit(after: Tensor, terms: list[Tensor]) -> tuple[list[float], float]:
    """Least squares: after = sum of c_i terms_i; the coefficients and the relative residual."""
    columns = torch.stack([t.double().flatten() for t in terms], dim=1)
    target = after.double().flatten()
    if not bool(torch.isfinite(columns).all() and torch.isfinite(target).all()):
        return [0.0] * len(terms), torch.inf
    solution = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    left = columns @ solution - target
    return [float(c) for c in solution], float(left.norm() / target.norm().clamp(min=1e-30))


def wiring(subject: Subject) -> Iterator[Finding]:
    """Block output = stream + attention + feed-forward (pre, parallel), or norms after the sums (post)."""
    id = "norm_placement/sum"
    if not subject.blocks():
        yield Finding.skip(id, "the model shows no list of blocks")
        return
    with subject.isolated(dtype=_double(subject)) as isolated:
        blocks = watch_blocks(isolated)
        whole = whole_layers(isolated, blocks)
        findings = [_judge(isolated, b) for b in whole]
    failed = next((f for f in findings if f is not None and f.verdict is Verdict.FAIL), None)
    if failed is not None:
        yield failed
        return
    known = [f for f in findings if f is not None]
    if not whole:
        yield Finding.skip(id, "its lists of modules are no whole layers: none reads what the one before gave")
        return
    if not known:
        yield Finding.skip(id, "the wiring of its blocks is none that is known here")
        return
    yield known[0]


def _double(subject: Subject) -> torch.dtype | None:
    """float64 where the model runs there."""
    try:
        with subject.isolated(dtype=torch.float64) as isolated:
            isolated.logits(isolated.tokens(1, isolated.length(3)))
    except Exception:
        return None
    return torch.float64


def _judge(isolated: Subject, block: Block) -> Finding | None:
    parts = [out for _, out in block.parts.values()]
    if not parts or len(parts) > 4 or block.entangled:
        return None
    at = layer_of(block.name, isolated.blocks())
    where = {"layer": at[1] if at else None, "block": block.name}
    id = "norm_placement/sum"
    placement = _declared_placement(isolated)
    coefficients, left = fit(block.after, [block.before, *parts])
    if left < FIT:
        if placement == "post":
            why = f"{block.name} adds to an un-normed stream (pre-norm); post-norm is declared"
            return Finding(id, Verdict.FAIL, left, None, why, "Norm the sums: x = norm(x + f(x)).", where)
        return _coefficients(isolated, block, coefficients, where) or Finding(
            id, Verdict.PASS, left, FIT, "output = stream + parts"
        )
    if _is_post(block):
        if not block.normed and (lost := _lost(block, parts, placement == "post")) is not None:
            why = f"{block.name}: {lost} reads what a part gives, and the stream is not added before it"
            return Finding(
                id, Verdict.FAIL, 0.0, 1.0, why, "Norm the sum: x = norm(x + f(x)).", {**where, "module": lost}
            )
        if placement == "pre":
            why = f"{block.name} norms its sums (post-norm); pre-norm is declared"
            return Finding(id, Verdict.FAIL, left, None, why, "Norm what each part reads: x = x + f(norm(x)).", where)
        return Finding(id, Verdict.PASS, 0.0, FIT, "norms stand after the sums")
    normed = [out for _, out in block.norms.values()]
    branch = [o for o in normed if any(torch.equal(i, out) for i, _ in block.norms.values() for out in parts)]
    if branch and fit(block.after, [block.before, *normed])[1] < FIT:
        return Finding(id, Verdict.PASS, 0.0, FIT, "what the parts give is normed before it is added")
    for name, (_, out) in block.norms.items():
        # a norm that only another norm reads is the embedding's, placed in the first block
        read = any(torch.equal(given, out) for given in block.read)
        _, left = fit(block.after, [out, *parts])
        if left < FIT and read and not _weighs_the_stream(isolated):
            why = f"{block.name} = {name}(stream) + parts: the residual starts from the normed stream"
            return Finding(id, Verdict.FAIL, left, FIT, why, "x = x + f(norm(x)): add to x itself.", where)
    _, left = fit(block.after, [block.before, *normed, *parts])
    if placement is not None and left < FIT:
        why = f"{block.name}: output is a sum of stream, norms and parts that no declared placement ({placement}) gives"
        return Finding(id, Verdict.FAIL, left, FIT, why, "pre: x = x + f(norm(x)); post: x = norm(x + f(x)).", where)
    if placement is not None and not block.norms:
        return None
    return None


def _is_post(block: Block) -> bool:
    """The last norm's output is the block's, and it read a sum."""
    return any(
        float((out - block.after).abs().max()) <= 1e-5 * max(rms(block.after), 1e-12) for _, out in block.norms.values()
    )


def _lost(block: Block, parts: list[Tensor], declared: bool) -> str | None:
    """In a post-norm block: a norm that reads parts alone, though its output is the stream of what follows.

    Where post-norm is declared, no norm may: one on a branch is another design.
    """
    for name, (read, out) in block.norms.items():
        later = [other for n, (other, _) in block.norms.items() if n != name]
        sums = [fit(other, [out, *parts]) for other in later]
        onward = declared or torch.equal(out, block.after) or any(left < FIT and c[0] > 0.5 for c, left in sums)
        if onward and fit(read, parts)[1] < FIT:
            return name
    return None


def _declared_placement(subject: Subject) -> str | None:
    declared = subject.facts.placement
    if isinstance(declared, bool):
        return "pre" if declared else "post"
    text = str(declared).lower() if declared is not None else ""
    return next((p for p in ("pre", "post", "parallel", "sandwich") if p in text), None)


def _coefficients(isolated: Subject, block: Block, found: list[float], where: dict[str, Any]) -> Finding | None:
    """The stream and each part must enter once, unless a multiplier is declared."""
    if _residual_factors(isolated) or all(abs(c - 1) < 1e-2 for c in found):
        return None
    names = ["the stream", *block.parts]
    # parts that are almost parallel (or zero) leave their coefficients open: judge what is well determined
    wrong = [(n, c) for n, c in zip(names, found, strict=True) if abs(c - 1) > 1e-2]
    sizes = {"the stream": rms(block.before), **{n: rms(o) for n, (_, o) in block.parts.items()}}
    kept = _numbers(isolated.blocks()[block.name])
    wrong = [(n, c) for n, c in wrong if sizes[n] > 1e-6 * max(sizes.values()) and not _is_kept(c, kept)]
    if not wrong:
        return None
    name, factor = wrong[0]
    missing = abs(factor) < 1e-2
    if missing and name != "the stream":
        return None  # a part that is not added gets no gradient, and is named there
    id = "norm_placement/sum" if missing and name == "the stream" else "residual_growth/sum"
    why = f"{block.name}: {name} enters the sum {factor:.3g} times, not once"
    return Finding(
        id,
        Verdict.FAIL,
        factor,
        1.0,
        why,
        "Add each part to the stream once: x = x + f(norm(x)).",
        {**where, "part": name},
    )


RESIDUAL_FACTOR = re.compile(
    r"multiplier|resid\w*_(scale|factor|alpha|beta)|scale_depth|alpha|beta_factor|branch_scale"
)


def _residual_factors(isolated: Subject) -> list[str]:
    """Fields of the config that declare factors on the residual stream or on what is added to it; 1 declares none."""
    numbers = {k for k, v in isolated.facts.raw.items() if type(v) in (int, float) and v != 1}
    return sorted(name for name in numbers if RESIDUAL_FACTOR.search(name.lower()))


def _weighs_the_stream(isolated: Subject) -> bool:
    """Whether the config has factors for stream and parts, whatever their value: that stream may be a normed one."""
    return any(re.search(r"alpha_|beta_factor", name.lower()) for name in isolated.facts.raw)


def _numbers(block: nn.Module) -> set[float]:
    """Numbers that a block or its parts keep, as plain attributes or learned: factors among them are by design.

    A learned one is a scalar, or a vector that still has one value: the gate of a branch (ReZero, LayerScale).
    """
    kept = [(n.lower(), v) for m in block.modules() for n, v in vars(m).items() if isinstance(v, float)]
    named = {v for n, v in kept if any(w in n for w in ("scal", "factor", "mult", "alpha", "beta", "gain", "coef"))}
    gates = [p.detach().flatten() for p in block.parameters() if p.dim() <= 1 or p.numel() == 1]
    return named | {float(p[0]) for p in gates if p.numel() and bool((p == p[0]).all())}


def _is_kept(factor: float, numbers: set[float]) -> bool:
    known = [n for n in numbers if n not in (0.0, 1.0)]
    return any(abs(factor / k - 1) < 1e-3 for n in known for k in (n, 1 / n))


def is_fresh(model: nn.Module) -> bool:
    """Whether weights are as initialised: every gain of a norm is still one constant."""
    gains = [p for m in model.modules() if is_norm(m) for n, p in m.named_parameters(recurse=False) if "bias" not in n]
    return bool(gains) and all(bool((g == g.flatten()[0]).all()) for g in gains)


def residual_growth(subject: Subject) -> Finding:
    """The stream's size after each block over before it, in fresh pre-norm models."""
    id = "residual_growth/rms"
    if subject.module is None or not is_fresh(subject.module):
        return Finding.skip(id, "judged on fresh weights only: trained blocks may grow the stream fifteenfold")
    with subject.isolated() as isolated:
        blocks = whole_layers(isolated, watch_blocks(isolated, 24))
    # where parts or sums are normed, the norm sets the size, whatever happened inside
    plain = [b for b in blocks if 1 <= len(b.parts) <= 4 and not b.entangled and _adds_its_parts(b)]
    ratios = [(b, rms(b.after) / max(rms(b.before), 1e-30), _expected_growth(subject, b)) for b in plain]
    worst = max(ratios, key=lambda p: max(p[1] / p[2], GROWTH[0] / max(p[1], 1e-30)), default=None)
    if worst is None:
        return Finding.skip(id, "no pre-norm block was seen")
    block, ratio, most = worst
    std = subject.facts.number("init_std")
    if ratio > most and std is not None and std**2 * block.before.shape[-1] > 1:
        why = f"the config declares initial weights of standard deviation {std:g}, at which a block drowns its input"
        return Finding(id, Verdict.SKIP, ratio, most, why, "", {"explained": True})
    at = layer_of(block.name, subject.blocks())
    why = f"the stream's size changes by {ratio:.3g} in {block.name}; its initial weights explain up to {most:.3g}"
    remedy = "Check what is added to the stream, and the initial size of the output projections (std / √(2L))."
    return Finding.within(id, ratio, GROWTH[0], most, why, remedy, layer=at[1] if at else None)


def _adds_its_parts(block: Block) -> bool:
    return fit(block.after, [block.before, *(out for _, out in block.parts.values())])[1] < 1e-3


def _norms_inside(module: nn.Module) -> bool:
    """Whether a part of a block holds a norm of its own, other than those of q and k."""
    names = [n for n, m in module.named_modules() if is_norm(m) and n.count(".")]
    return any(not any(w in n.lower().rpartition(".")[2] for w in ("q_", "k_", "qk", "query", "key")) for n in names)


def _biases(module: nn.Module | None, width: int) -> float:
    """What biases add by themselves: PyTorch draws them as large as the matrices, however small those were made."""
    named = [] if module is None else list(module.named_modules())
    found = [
        p.detach().float() for _, m in named if not is_norm(m) for n, p in m.named_parameters(recurse=False) if "b" in n
    ]
    return float(sum(p.square().mean() for p in found if p.shape == (width,)))


def _expected_growth(subject: Subject, block: Block) -> float:
    """What matrices of standard deviation s can add to a normed stream: s²D by attention, s²√(D·4D) by feed-forward.

    s is the median over the block's matrices, so that one matrix drawn too large does not excuse itself. What is normed
    inside a part comes to its last map at size 1. A factor on the parts that the block keeps as a number is by design.
    """
    module = subject.blocks().get(block.name)
    shapes = [p for p in module.parameters() if p.dim() == 2] if module is not None else []
    stds = sorted(float(p.detach().float().std()) for p in shapes)
    if module is None or not stds:
        return GROWTH[1]
    width, s = block.before.shape[-1], stds[len(stds) // 2]
    added = (s**2 * width) ** 2 + (2 * s**2 * width) ** 2
    if _norms_inside(module):
        added = max(added, s**2 * width + s**2 * max(n for p in shapes for n in p.shape))
    factors, _ = fit(block.after, [block.before, *(out for _, out in block.parts.values())])
    kept = _numbers(module)
    most = max((abs(c) for c in factors[1:] if _is_kept(c, kept)), default=1.0)
    added = max(1.0, most) ** 2 * added + _biases(module, width)
    return max(GROWTH[1], 1.3 * (1 + added / max(rms(block.before), 1e-30) ** 2) ** 0.5)
