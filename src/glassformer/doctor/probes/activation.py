"""Which activation a feed-forward applies: found by fitting what the second map reads from what the first one gave."""

from itertools import permutations

import torch
from torch import Tensor

from glassformer.anatomy.fits import ACTIVATION_FUNCTIONS
from glassformer.anatomy.trace import Linear
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


def _named(u: Tensor, p: Tensor) -> str | None:
    """The function with p = f(u)."""
    errors = {name: float((f(u) - p).abs().max()) for name, f in ACTIVATION_FUNCTIONS.items()}
    best = min(errors, key=lambda n: errors[n])
    return best if errors[best] <= CLOSE * max(float(p.abs().max()), 1e-6) else None


def _pointwise(u: Tensor, p: Tensor) -> bool:
    """Whether p is some function of u alone, of bounded slope: neighbours in u are neighbours in p."""
    u, order = u.flatten().sort()
    steps, rises = u.diff(), p.flatten()[order].diff().abs()
    wide = steps > 1e-9 * float(u.abs().max().clamp(min=1e-30))
    slopes = rises[wide] / steps[wide]
    return len(slopes) > 99 and float(slopes.quantile(0.99)) < 4


def _gated(a: Tensor, b: Tensor, p: Tensor) -> str | None:
    """The function with p = f(a) * b."""
    errors = {n: float((f(a) * b - p).abs().max()) for n, f in ACTIVATION_FUNCTIONS.items() if n != "identity"}
    best = min(errors, key=lambda n: errors[n])
    return best if errors[best] <= CLOSE * max(float(p.abs().max()), 1e-6) else None


def between(before: list[Linear], after: Linear) -> str | None:
    """The activation between some of the maps before and this one; None when none fits."""
    p = after.input.double().reshape(after.input.shape[0], -1)
    near = [m.output.double() for m in before[-3:]]
    same = [o for o in near if o.numel() == p.numel()]
    for u in reversed(same):
        if (name := _named(u.reshape_as(p), p)) is not None and name != "identity":
            return name
    for a, b in permutations(same, 2):
        if (name := _gated(a.reshape_as(p), b.reshape_as(p), p)) is not None:
            return name
    for u in reversed(same):
        if _pointwise(u.reshape_as(p), p) and not torch.equal(u.reshape_as(p), p):
            return OTHER
    for fused in (o for o in near if o.numel() == 2 * p.numel()):
        halves = fused.reshape(p.shape[0], -1).chunk(2, dim=-1)
        for a, b in permutations(halves, 2):
            if (name := _gated(a, b, p)) is not None:
                return name
    return None


def found_activations(subject: Subject) -> dict[str, str]:
    """Activation by layer ("stack.number"), read from warm weights so that the functions differ."""
    with subject.isolated(max(subject.warmth, 1.0)) as isolated:
        trace = trace_call(isolated, isolated.tokens(2, isolated.length(13), seed=19))
        blocks = isolated.blocks()
    merged = {id(a.merged) for a in trace.attentions if a.merged is not None}
    by_layer: dict[str, list[Linear]] = {}
    for linear in trace.linears:
        at = layer_of(linear.path, blocks)
        if at is not None:
            by_layer.setdefault(f"{at[0]}.{at[1]}", []).append(linear)
    found = {}
    for layer, linears in by_layer.items():
        for i, linear in enumerate(linears):
            if i and id(linear.input) not in merged and (name := between(linears[:i], linear)) is not None:
                found[layer] = name
                break
        else:
            last = linears[-1]
            near = [m.output for m in linears[:-1][-2:] if m.output.numel() == last.input.numel()]
            if any(torch.equal(o.reshape(-1), last.input.reshape(-1)) for o in near):
                found[layer] = "identity"
    return found if set(found.values()) != {"identity"} else {}


def as_declared(subject: Subject) -> Finding:
    """The activation of every layer against the config's; without one, against the other layers'."""
    id = "activation/traced"
    found = found_activations(subject)
    if not found:
        return Finding.skip(id, "no feed-forward of two maps with a known activation between them was seen")
    said = subject.facts.activation
    wanted = SPELLINGS.get(str(said).lower()) if said is not None else None
    names = sorted(set(found.values()))
    if wanted is None and len(names) > 1:
        common = max(names, key=lambda n: list(found.values()).count(n))
        wanted, said = (common,), f"{common} in the other layers"
    if wanted is None:
        return Finding(id, Verdict.PASS, why=f"{names[0]} in every layer; none is declared")
    wrong = [layer for layer, name in found.items() if name not in wanted]
    if wrong:
        numbers = [int(layer.rpartition(".")[2]) for layer in wrong]
        layers = f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        why = f"{found[wrong[0]]} in {layers}; declared: {said}"
        remedy = f"Use the declared activation ({said}) in every layer; exact and tanh GELU are two functions."
        return Finding(
            id, Verdict.FAIL, float(len(wrong)), 0.0, why, remedy, {"layer": numbers[0], "found": found[wrong[0]]}
        )
    return Finding(id, Verdict.PASS, 0.0, 0.0, f"{names[0]} in every layer, as declared")
