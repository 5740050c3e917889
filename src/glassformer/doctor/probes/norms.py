"""Norms one by one: each token by itself, eps and formula as declared. Wiring of blocks is in blocks.py."""

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.doctor.subject.measure import gap, many, rms
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.finding import Finding, Verdict

SMALL = 1e-3
"""Standard deviation at which eps shows: eps = 1e-5 is ten times the variance."""


@dataclass
class Norm:
    name: str
    module: nn.Module
    input: Tensor

    @property
    def width(self) -> int:
        return int(self.input.shape[-1])

    @property
    def channels_first(self) -> bool:
        """Whether it reads (B,D,T): its weight has the width of the second axis and not of the last."""
        widths = {p.shape[0] for p in self.module.parameters() if p.dim() == 1}
        return widths == {self.input.shape[1]} and widths != {self.input.shape[2]}


def is_norm(module: nn.Module) -> bool:
    """By its class name, or by having only one or two vectors of one width; no modules with parameters inside."""
    children = list(module.children())
    if any(True for c in children for _ in c.parameters()) or isinstance(module, nn.Embedding | nn.Linear | nn.PReLU):
        return False
    if "norm" in type(module).__name__.lower():
        return True
    if children:
        return False
    shapes = [tuple(p.shape) for p in module.parameters()]
    return 1 <= len(shapes) <= 2 and len(set(shapes)) == 1 and len(shapes[0]) == 1 and shapes[0][0] > 1


def norms_of(isolated: Subject, rows: int = 2, length: int = 9) -> list[Norm]:
    """Every norm module that a forward calls with a stream, with what it read there."""
    found: dict[str, Norm] = {}
    handles = []
    if isolated.module is None:
        return []
    for name, module in isolated.module.named_modules():
        if is_norm(module):

            def keep(m: nn.Module, args: Any, output: Any, name: str = name) -> None:
                fits = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
                if fits and args[0].shape == output.shape and args[0].dim() == 3 and name not in found:
                    found[name] = Norm(name, m, args[0].detach().clone())

            handles.append(module.register_forward_hook(keep))
    try:
        isolated.logits(isolated.tokens(rows, isolated.length(length), seed=14))
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def each_token_by_itself(subject: Subject) -> Finding:
    """Change one token of a norm's input: the others' outputs must not move. Also in train mode."""
    id, remedy = (
        "norm_axis/tokens",
        "Take statistics over the width of one token: LayerNorm(d_model), not over time or batch.",
    )
    looked = False
    for train in (False, True):
        with subject.isolated(train=train) as isolated:
            blocks = isolated.blocks()
            for norm in norms_of(isolated):
                looked = True
                base = norm.module(norm.input.clone())
                by_token = _tokens_second(norm, base)
                for what, position in (("time", (0, -1)), ("batch", (-1, 0))):
                    changed = norm.input.clone()
                    tokens = _tokens_second(norm, changed)
                    tokens[position] = tokens[position].flip(-1) * 1.7 + 0.3
                    moved = _tokens_second(norm, norm.module(changed))
                    keep = (0, slice(0, -1)) if what == "time" else (0, slice(None))
                    off = gap(by_token[keep], moved[keep])
                    if off > 1e-6 * max(rms(base), 1e-12):
                        at = layer_of(norm.name, blocks)
                        mode = "in train mode " if train else ""
                        why = (
                            f"{norm.name} {mode}takes its statistics over {what}: another token's change moves this one"
                        )
                        evidence = {"layer": at[1] if at else None, "module": norm.name, "over": what}
                        return Finding(id, Verdict.FAIL, off, 0.0, why, remedy, evidence)
    if not looked:
        return Finding.skip(id, "no norm modules were seen")
    return Finding(id, Verdict.PASS, 0.0, 0.0, "each norm reads one token at a time")


def _tokens_second(norm: Norm, x: Tensor) -> Tensor:
    """A view as (B,T,D), whichever layout the norm reads."""
    return x.transpose(1, 2) if norm.channels_first else x


@dataclass
class Formula:
    """What a norm computes: eps, whether it is outside the root, and the factor left over (unbiased: √((n-1)/n))."""

    eps: float
    outside: bool
    factor: float
    centred: bool


def formula_of(norm: Norm) -> Formula | None:
    """Feed rows of known spread and solve for eps; None when this is no layer or RMS norm."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(1, 1, norm.width, generator=generator, dtype=torch.float64)
    z = ((z - z.mean()) / z.std(unbiased=False)).to(norm.input.device)
    module = norm.module.double()
    zero = module(torch.zeros_like(z))
    if not bool(torch.isfinite(zero).all()):
        zero = module(z * 0 + 1e-300)

    def gain(scale: float) -> Tensor:
        return (module(z * scale) - zero) / z

    # so large that any eps vanishes
    full = gain(1e6)
    if not bool(torch.isfinite(full).all()):
        return None
    live = full.abs() > 1e-9
    if not bool(live.any()):
        return None
    # a norm gives the same for an input a thousand times as large; a map without one, such as x w + b, does not
    if gap(gain(1e3), full) > 1e-2 * rms(full):
        return None
    ratio = {s: float((gain(s)[live] / full[live]).median()) for s in (SMALL, SMALL / 8)}
    r = ratio[SMALL]
    if not 0 < r <= 1 + 1e-5:  # a norm that computes in float32 gives some 1e-7 too much
        return None
    inside = SMALL**2 * (1 / min(r, 1.0) ** 2 - 1)
    outer = SMALL * (1 / min(r, 1.0) - 1)
    small = SMALL / 8
    predicted = {False: small / math.sqrt(small**2 + inside), True: small / (small + outer)}
    outside = abs(predicted[True] - ratio[small]) < abs(predicted[False] - ratio[small])
    shifted = module(z * 1e6 + 3e6)
    centred = gap(shifted, module(z * 1e6)) <= 1e-6 * max(rms(shifted), 1e-12)
    return Formula(outer if outside else inside, outside, _factor(module, full, live), centred)


def _factor(module: nn.Module, full: Tensor, live: Tensor) -> float:
    """What the output is multiplied by beyond the weight; the weight may be stored as w or as w - 1."""
    weight = next(
        (p for n, p in module.named_parameters() if n in ("weight", "gain", "gamma", "scale", "g", "a_2", "w")), None
    )
    if weight is None or weight.numel() != full.numel():
        return float(full[live].median())
    stored = weight.detach().double().reshape_as(full)
    options = [
        float((full[live] / w[live]).median()) for w in (stored, 1 + stored) if bool((w[live].abs() > 1e-9).all())
    ]
    return min(options, key=lambda f: abs(f - 1)) if options else 1.0


def _precision(subject: Subject) -> torch.dtype | None:
    """float64, or None (its own) for a model that casts to float32 on its way and then fails."""
    with contextlib.suppress(Exception), subject.isolated(dtype=torch.float64) as isolated:
        norms_of(isolated)
        return torch.float64
    return None


def eps_as_declared(subject: Subject) -> Iterator[Finding]:
    """Measured eps and formula of every norm against the config's, else against the module's own `eps`."""
    id = "norm_eps/formula"
    declared = subject.facts.number("eps")
    count, notes = 0, []
    with subject.isolated(dtype=_precision(subject)) as isolated:
        try:
            norms = norms_of(isolated)
        except Exception:
            norms = []
        blocks = isolated.blocks()
        # norms of heads and of a narrow embedding may have an eps of their own
        usual = statistics.multimode(norm.width for norm in norms)
        for norm in norms:
            if norm.width not in usual or norm.channels_first or (found := formula_of(norm)) is None:
                continue
            count += 1
            own = getattr(norm.module, "eps", getattr(norm.module, "variance_epsilon", None))
            wanted = declared if declared is not None else own if isinstance(own, float) else None
            at = layer_of(norm.name, blocks)
            where = {"layer": at[1] if at else None, "module": norm.name, "eps": found.eps}
            unbiased = math.sqrt((norm.width - 1) / norm.width)
            trouble = None
            if found.outside and found.eps > 1e-9:
                trouble = (
                    f"eps ({found.eps:.3g}) is added to the standard deviation, not to the variance under the root"
                )
            elif abs(found.factor - unbiased) < 1e-5 and norm.width > 2:
                trouble = "the standard deviation is the unbiased one (divided by D - 1)"
            elif wanted and not 0.9 < found.eps / wanted < 1.1 and max(found.eps, wanted) > 1e-13:
                trouble = f"eps is {found.eps:.3g}, declared {wanted:.3g}"
            known = isinstance(own, float) and 0.9 < found.eps / own < 1.1
            if trouble and known and subject.interface.library and not found.outside:
                why = f"{norm.name}: {trouble}; its library does not read the config there, and weights were trained so"
                yield Finding(id, Verdict.SKIP, found.eps, wanted, why, "", {**where, "explained": True})
                return
            if trouble:
                remedy = "(x - mean) / sqrt(var + eps), var divided by D, with the declared eps."
                why = f"{norm.name}: {trouble}"
                yield Finding(id, Verdict.FAIL, found.eps, wanted, why, remedy, where)
                return
            if wanted is None:
                notes.append(f"{norm.name} has eps {found.eps:.3g}")
    if not count:
        yield Finding.skip(id, "no norm modules were seen")
        return
    yield Finding(
        id,
        Verdict.PASS,
        why=f"every one of {many(count, 'norm')} computes what is declared" + (f"; {notes[0]}" if notes else ""),
    )
