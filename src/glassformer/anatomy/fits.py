"""Which formula made these numbers? Each fit tries the conventions in use on recorded inputs and outputs.

A fit returns the formula in words and its residual, the largest difference left; in float64 the right one leaves 1e-12
and the wrong one does not, so nothing has to be guessed from sizes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.shapes import Float

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "identity": lambda x: x,
}
"""Activation functions by the names that configs use."""

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried first, in this order: the usual ones."""


@dataclass(frozen=True)
class Norm:
    """One way to normalise a row; `eps` inside or outside the root, variance divided by D or by D - 1."""

    kind: str
    eps: float = 0.0
    unbiased: bool = False
    outside: bool = False

    def __str__(self) -> str:
        if self.kind == "none":
            return "no norm"
        name = {"layer": "LayerNorm", "rms": "RMSNorm"}[self.kind]
        return name + f"(eps={self.eps:g}" + ", D - 1" * self.unbiased + ", eps outside the root" * self.outside + ")"

    def __call__(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        if self.kind == "none":
            return x
        centred = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        square = centred.square().sum(-1, keepdim=True) / (x.shape[-1] - self.unbiased)
        return centred / (square.sqrt() + self.eps if self.outside else (square + self.eps).sqrt())


@dataclass
class NormFit:
    norm: Norm
    weight: Float[Tensor, "D"]
    bias: Float[Tensor, "D"]
    residual: float

    def __call__(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        return self.norm(x) * self.weight + self.bias


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference over the size of b; infinite for other shapes or a NaN."""
    if a.shape != b.shape:
        return math.inf
    size = max(float(b.square().mean().sqrt()) if b.numel() else 0.0, 1e-300)
    worst = float((a - b).abs().max()) if b.numel() else 0.0
    return worst / size if math.isfinite(worst) else math.inf


def norms(eps: float) -> Iterator[Norm]:
    yield Norm("layer", eps)
    yield Norm("rms", eps)
    yield Norm("layer", eps, unbiased=True)
    yield Norm("layer", eps, unbiased=True, outside=True)
    yield Norm("layer", eps, outside=True)
    yield Norm("rms", eps, outside=True)


def fit_norm(x: Float[Tensor, "*n D"], y: Float[Tensor, "*n D"]) -> NormFit:
    """The norm and the affine map per column that lead from x to y."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    ones, zeros = torch.ones_like(x[0]), torch.zeros_like(x[0])
    best = NormFit(Norm("none"), ones, zeros, distance(x, y))
    for eps in EPSILONS:
        for norm in norms(eps):
            tried = _affine(norm, x, y)
            # a constant row variance hides D - 1 and eps in the weight: the usual form is named unless it is worse
            if tried.residual < best.residual / 10:
                best = tried
    if best.residual > 1e-9 and best.norm.kind != "none":
        other = _refined(best.norm, x, y)
        best = other if other.residual < best.residual / 10 else best
    return best


def _affine(norm: Norm, x: Tensor, y: Tensor) -> NormFit:
    made = norm(x)
    centred = made - made.mean(0)
    weight = (centred * (y - y.mean(0))).sum(0) / centred.square().sum(0).clamp(min=1e-300)
    bias = y.mean(0) - weight * made.mean(0)
    return NormFit(norm, weight, bias, distance(made * weight + bias, y))


def _refined(norm: Norm, x: Tensor, y: Tensor) -> NormFit:
    """Any eps, by bisecting its logarithm around the best usual one."""
    low, high = math.log10(norm.eps) - 1.5, math.log10(norm.eps) + 1.5

    def at(power: float) -> NormFit:
        return _affine(Norm(norm.kind, 10**power, norm.unbiased, norm.outside), x, y)

    for _ in range(60):
        left, right = low + (high - low) * 0.382, low + (high - low) * 0.618
        if at(left).residual < at(right).residual:
            high = right
        else:
            low = left
    return at((low + high) / 2)


def norm_with(fit: NormFit, x: Float[Tensor, "*n D"], y: Float[Tensor, "*n D"]) -> tuple[Norm, float]:
    """The norm that leads from x to y with the weights of another fit."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    tried = [(norm, distance(norm(x) * fit.weight + fit.bias, y)) for eps in EPSILONS for norm in norms(eps)]
    return min([(Norm("none"), distance(x, y)), *tried], key=lambda t: t[1])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exact GELU": ACTIVATION_FUNCTIONS["gelu"],
    "tanh GELU": ACTIVATION_FUNCTIONS["gelu_tanh"],
    "sigmoid GELU (x·σ(1.702x))": ACTIVATION_FUNCTIONS["quick_gelu"],
    "SiLU": ACTIVATION_FUNCTIONS["silu"],
    "ReLU": ACTIVATION_FUNCTIONS["relu"],
    "squared ReLU": ACTIVATION_FUNCTIONS["relu2"],
    "tanh": ACTIVATION_FUNCTIONS["tanh"],
    "sigmoid": ACTIVATION_FUNCTIONS["sigmoid"],
    "leaky ReLU (0.01)": ACTIVATION_FUNCTIONS["leaky_relu"],
    "ELU": ACTIVATION_FUNCTIONS["elu"],
    "SELU": F.selu,
    "softplus": ACTIVATION_FUNCTIONS["softplus"],
    "Mish": ACTIVATION_FUNCTIONS["mish"],
    "no activation": ACTIVATION_FUNCTIONS["identity"],
}


def fit_activation(pre: list[Float[Tensor, "*n F"]], post: Float[Tensor, "*n F"]) -> tuple[str, float]:
    """The activation between the projections that read the stream and the one that writes to it."""
    tried: list[tuple[str, float]] = []
    for name, function in ACTIVATIONS.items():
        if len(pre) == 1:
            tried.append((name, distance(function(pre[0]), post)))
        if len(pre) == 2:
            tried.append((f"{name} of the first projection as gate", distance(function(pre[0]) * pre[1], post)))
            tried.append((f"{name} of the second projection as gate", distance(function(pre[1]) * pre[0], post)))
    return min(tried, key=lambda t: t[1], default=("unknown", math.inf))


@dataclass
class RotationFit:
    """How a head was turned on its way from the projection to the product."""

    pairing: str
    rotated: int
    turns: Float[Tensor, "T P"]
    """Complex factor per position and pair."""
    residual: float

    @property
    def frequencies(self) -> Float[Tensor, "P"]:
        steps = self.turns[1:] * self.turns[:-1].conj()
        return torch.angle(steps.mean(0))

    @property
    def still(self) -> bool:
        """Nothing is turned."""
        return float(torch.angle(self.turns).abs().max()) < 1e-9

    @property
    def start(self) -> float:
        """Position of the first token: its angle in the fastest pair over that pair's angle per position."""
        return float(torch.angle(self.turns[0, 0])) / float(self.frequencies[0])

    @property
    def base(self) -> float | None:
        """The base whose powers the frequencies are, None where they are not one base's."""
        freq, pairs = self.frequencies.abs(), self.frequencies.shape[0]
        if pairs < 2 or float(freq[-1]) < 1e-12:
            return None
        base = math.exp(-math.log(float(freq[1])) * pairs)
        made = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        return base if float((freq - made).abs().max()) < 1e-5 else None

    def __str__(self) -> str:
        if self.still:
            return "no rotation"
        which = (
            "component i with i + R/2 (halves)" if self.pairing == "halves" else "components 2i and 2i+1 (interleaved)"
        )
        base = "no single base" if self.base is None else f"base {self.base:.6g}"
        way = "" if float(self.frequencies[0]) > 0 else ", turning backwards"
        first = round(self.start, 3) + 0.0
        return f"rotary, pairing {which}, {self.rotated} components, {base}, first position {first:g}{way}"


def fit_rotation(flat: Float[Tensor, "B N T K"], turned: Float[Tensor, "B N T K"]) -> RotationFit | None:
    """The rotation by position that leads from one to the other, up to a factor; None where none does."""
    if flat.shape != turned.shape or flat.shape[2] < 3 or flat.shape[3] % 2:
        return None
    width = flat.shape[-1]
    best: RotationFit | None = None
    for rotated in (r for r in range(width, 1, -2)):
        for pairing in ("halves", "interleaved"):
            a, b = _paired(flat[..., :rotated], pairing), _paired(turned[..., :rotated], pairing)
            turns = (b * a.conj()).sum((0, 1)) / a.abs().square().sum((0, 1)).clamp(min=1e-300)
            factor = turns.abs().mean()
            unit = turns / turns.abs().clamp(min=1e-300)
            made = torch.cat([_unpaired(a * unit * factor, pairing), flat[..., rotated:] * factor], -1)
            tried = RotationFit(pairing, rotated, unit, distance(made, turned))
            if best is None or tried.residual < best.residual / 10:
                best = tried
        if best is not None and best.residual < 1e-5:
            break
    return _trimmed(best) if best is not None and best.residual < 1e-4 else None


def _trimmed(fit: RotationFit) -> RotationFit:
    """Without the last of interleaved pairs that stand still: only part of the head is rotated."""
    moving = (torch.angle(fit.turns).abs().amax(0) > 1e-9).nonzero()
    if fit.pairing == "halves" or not len(moving):
        return fit
    pairs = int(moving[-1]) + 1
    return RotationFit(fit.pairing, 2 * pairs, fit.turns[:, :pairs], fit.residual)


def _paired(x: Tensor, pairing: str) -> Tensor:
    a, b = x.chunk(2, -1) if pairing == "halves" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(a.contiguous(), b.contiguous())


def _unpaired(z: Tensor, pairing: str) -> Tensor:
    return torch.cat([z.real, z.imag], -1) if pairing == "halves" else torch.stack([z.real, z.imag], -1).flatten(-2)


def fit_factor(a: Tensor, b: Tensor) -> tuple[float, float]:
    """c with c·a nearest to b, and what is left."""
    c = float((a * b).sum() / a.square().sum().clamp(min=1e-300))
    return c, distance(c * a, b)


def fit_softcap(plain: Tensor, capped: Tensor) -> tuple[float, float]:
    """c with c·tanh(plain / c) nearest to capped, and what is left."""
    best = (math.inf, math.inf)
    for power in torch.linspace(-1, 3, 401, dtype=torch.float64):
        cap = float(10**power)
        left = distance(cap * torch.tanh(plain / cap), capped)
        best = min(best, (left, cap))
    low, high = best[1] / 1.03, best[1] * 1.03
    for _ in range(80):
        one, two = low + (high - low) * 0.382, low + (high - low) * 0.618
        if distance(one * torch.tanh(plain / one), capped) < distance(two * torch.tanh(plain / two), capped):
            high = two
        else:
            low = one
    cap = (low + high) / 2
    return cap, distance(cap * torch.tanh(plain / cap), capped)


def describe_mask(seen: Float[Tensor, "B H T S"]) -> str:
    """Who sees whom, in words."""
    view = seen.bool().any(1)  # some head
    B, T, S = view.shape
    i = torch.arange(T)[:, None] + S - T
    j = torch.arange(S)[None]
    forms: list[tuple[str, Tensor]] = [
        ("every key", torch.ones(T, S, dtype=torch.bool)),
        ("causal", j <= i),
        ("causal without itself", j < i),
        ("causal and one key of the future", j <= i + 1),
        ("only the future (the mask upside down)", j > i),
        ("itself and the future (the mask upside down)", j >= i),
    ]
    forms += [(f"causal, window {w}", (j <= i) & (i - j < w)) for w in range(1, S)]
    forms += [(f"window {w} to either side", (i - j).abs() < w) for w in range(1, S)]
    for name, form in forms:
        if all(torch.equal(view[b], form) for b in range(B)):
            return name
    shared = all(torch.equal(view[0], view[b]) for b in range(B))
    return "another pattern" if shared else "a pattern that depends on the row (padding)"


def turn(x: Float[Tensor, "B N T K"], fit: RotationFit, backwards: bool = False) -> Float[Tensor, "B N T K"]:
    """Apply a measured rotation, or undo it."""
    turns = fit.turns.conj() if backwards else fit.turns
    made = _unpaired(_paired(x[..., : fit.rotated], fit.pairing) * turns, fit.pairing)
    return torch.cat([made, x[..., fit.rotated :]], -1)
