"""Which activation a feed-forward applies: found by fitting what the second map reads from what the first one gave."""

from itertools import permutations

import torch
from torch import Tensor

from glassformer.anatomy.fits import ACTIVATION_FUNCTIONS
from glassformer.anatomy.trace import Linear, Trace
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict

SPELLINGS: dict[str, tuple[str, ...]] = {
    "gelu": ("gelu",),
    "gelu_exact": ("gelu",),
    "gelu_python": ("gelu",),
    "gelu_new": ("gelu_tanh",),
    "gelu_tanh": ("gelu_tanh",),
    "gelu_pytorch_tanh": ("gelu_tanh",),
    "gelu_fast": ("gelu_tanh",),
    "gelu_approx": ("gelu_tanh",),
    "gated-gelu": ("gelu_tanh",),
    "quick_gelu": ("quick_gelu",),
    "geglu": ("gelu", "gelu_tanh"),
    "silu": ("silu",),
    "swish": ("silu",),
    "swiglu": ("silu",),
    "gated-silu": ("silu",),
    "relu": ("relu",),
    "reglu": ("relu",),
    "relu2": ("relu2",),
    "relu_squared": ("relu2",),
    "squared_relu": ("relu2",),
    "tanh": ("tanh",),
    "mish": ("mish",),
}
CLOSE = 1e-5
"""Relative to the largest value: float32 evaluates each function to 1e-6; exact and tanh GELU differ by 5e-4."""

OTHER = "a function of another name"


def _names(u: Tensor, p: Tensor, gate: Tensor | float = 1.0) -> list[str]:
    """Every function with p = f(u) (times a gate), the nearest first. Values far from 0 may fit several."""
    errors = {name: float((f(u) * gate - p).abs().max()) for name, f in ACTIVATION_FUNCTIONS.items()}
    bound = CLOSE * max(float(p.abs().max()), 1e-6)
    return sorted((n for n in errors if errors[n] <= bound and n != "identity"), key=lambda n: errors[n])


def _pointwise(u: Tensor, p: Tensor) -> bool:
    """Whether p is some function of u alone, of bounded slope: neighbours in u are neighbours in p."""
    u, order = u.flatten().sort()
    steps, rises = u.diff(), p.flatten()[order].diff().abs()
    wide = steps > 1e-9 * float(u.abs().max().clamp(min=1e-30))
    slopes = rises[wide] / steps[wide]
    return len(slopes) > 99 and float(slopes.quantile(0.99)) < 4 and float(rises.max()) > 0


def between(after: Linear) -> list[str]:
    """The activations that may lie between a linear layer and those whose outputs it reads; none when none fits."""
    p = after.input.double().reshape(after.input.shape[0], -1)
    near = [m.output.double() for m in after.sources]
    same = [o.reshape_as(p) for o in near if o.numel() == p.numel()]
    halves = [o.reshape(p.shape[0], -1).chunk(2, dim=-1) for o in near if o.numel() == 2 * p.numel()]
    for u in same:
        if found := _names(u, p):
            return found
    for a, b in [pair for pieces in (same, *halves) for pair in permutations(pieces, 2)]:
        if found := _names(a, p, b):
            return found
    if any(_pointwise(u, p) and not torch.equal(u, p) for u in same):
        return [OTHER]
    return ["identity"] if any(torch.equal(u, p) for u in same) else []


def _is_second_map(linear: Linear, widths: set[int]) -> bool:
    """Whether this is the last map of a feed-forward: it reads maps of the stream, nothing else, and has its width.

    A router, a gate or the output map of attention is not. `widths` are those that the stream may have.
    """
    width = linear.output.shape[-1]
    reads = bool(linear.sources) and not linear.mixes and all(m.input.shape[-1] == width for m in linear.sources)
    return reads and (width in widths or not widths)


def _stream_widths(subject: Subject, trace: Trace) -> set[int]:
    """The declared width, and those that the projections of attention read."""
    maps = frozenset[int]().union(*(a.maps | a.v_maps for a in trace.attentions))
    width = subject.facts.whole("d_model")
    return {m.input.shape[-1] for m in trace.linears if m.weight in maps} | ({width} if width else set())


def found_activations(subject: Subject) -> dict[str, list[str]]:
    """The activations that fit by layer ("stack.number"), read from warm weights so that the functions differ."""
    half = torch.finfo(subject.dtype).bits < 32
    with subject.isolated(max(subject.warmth, 1.0), dtype=torch.float32 if half else None) as isolated:
        trace = trace_call(isolated, isolated.tokens(2, isolated.length(13), seed=19))
        blocks, widths = isolated.blocks(), _stream_widths(isolated, trace)
    found: dict[str, list[str]] = {}
    for linear in trace.linears:
        at = layer_of(linear.path, blocks)
        if at is not None and _is_second_map(linear, widths) and (names := between(linear)):
            layer = f"{at[0]}.{at[1]}"
            if found.get(layer, ["identity"]) == ["identity"]:
                found[layer] = names
    return found if any(names != ["identity"] for names in found.values()) else {}


def as_declared(subject: Subject) -> Finding:
    """The activation of every layer against the config's; without one, against the other layers'."""
    id = "activation/traced"
    found = found_activations(subject)
    if not found:
        return Finding.skip(id, "no feed-forward of two maps with a known activation between them was seen")
    declared = subject.facts.every("activation")
    wanted = [name for value in declared for name in SPELLINGS.get(str(value).lower(), ())]
    expected = ", ".join(map(str, declared))
    names = sorted({fitting[0] for fitting in found.values()})
    if not wanted and len(names) > 1:
        common = max(names, key=lambda n: sum(n in fitting for fitting in found.values()))
        wanted, expected = [common], f"{common} in the other layers"
    if not wanted:
        return Finding(id, Verdict.PASS, why=f"{names[0]} in every layer; none is declared")
    wrong = [layer for layer, fitting in found.items() if not set(fitting) & set(wanted)]
    if wrong:
        numbers = [int(layer.rpartition(".")[2]) for layer in wrong]
        layers = f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        name = found[wrong[0]][0]
        why = f"{name} in {layers}; declared: {expected}"
        remedy = f"Use the declared activation ({expected}) in every layer; exact and tanh GELU are two functions."
        evidence = {"layer": numbers[0], "found": name}
        return Finding(id, Verdict.FAIL, float(len(wrong)), 0.0, why, remedy, evidence)
    return Finding(id, Verdict.PASS, 0.0, 0.0, f"{names[0]} in every layer, as declared")
