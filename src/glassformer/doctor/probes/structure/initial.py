"""Initial sizes of the head and of the output projections, for models of any style.

Both are judged on fresh weights, against what is declared: `init_std`, and a rule for output projections. Without a
declared rule one thing can still be wrong: some output projections start at 1/√(2L) of the other matrices and some do
not, so that the rule was meant and did not reach them all.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from glassformer.anatomy.parts import Projection
from glassformer.doctor.probes.blocks import is_fresh
from glassformer.doctor.probes.structure.recording import Recording
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

OUTPUTS, HEAD = "residual_growth/init", "init_loss/head"
TOLERANCE = 0.12
"""Relative, in addition to the sampling error: 1/√(2L) is 0.5 for two layers, so that two sizes are never confused."""
LARGE_HEAD = 1.5
"""Times the declared standard deviation: sampling error is a hundredth for the smallest heads."""


RULES = ("scaled", "gpt2", "gpt-2", "2l", "depth")
"""Words by which a config declares that output projections start at std/√(2L)."""


@dataclass
class Output:
    """An output projection: which parameter, of what, at which layer, and its standard deviation."""

    name: str
    what: str
    layer: int
    size: float
    error: float
    width: int
    uniform: bool


def fresh(module: nn.Module) -> bool:
    """Whether gains of norms are still one constant; also where the norms are functions and the gains parameters."""
    if is_fresh(module):
        return True
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 and parameter.numel() > 1:
            groups.setdefault(re.sub(r"\d+", "#", name), []).append(parameter.detach())
    gains = [g for g in groups.values() if any(bool((p == p[0]).all()) and float(p[0]) != 0 for p in g)]
    return bool(gains) and all(bool((p == p[0]).all()) for g in gains for p in g)


def declares_scaled_outputs(subject: Subject) -> bool:
    """Whether the config says that output projections start at std/√(2L)."""
    declared = subject.facts.residual_init
    return declared is True or (isinstance(declared, str) and any(word in declared.lower() for word in RULES))


def _std(weight: Tensor) -> float:
    return float(weight.double().std())


def _is_uniform(weight: Tensor) -> bool:
    """Whether no number lies further out than in a uniform distribution: √3 standard deviations."""
    return float(weight.double().abs().max()) < 1.85 * _std(weight)


def _outputs(recording: Recording) -> tuple[list[Output], list[float], int]:
    """Output projections of every block, the sizes of the matrices that read the stream, and the stream's width."""
    outputs, inner, layers, width = list[Output](), list[float](), dict[str, int](), 0
    for block in recording.anatomy.blocks:
        if block.attention.cross:
            continue
        stack = block.attention.stack
        layer = layers[stack] = layers.get(stack, -1) + 1
        inner += [_std(p.weight) for p in block.attention.projections.values()]
        width = max([len(p.weight) for p in block.attention.projections.values()], default=width)
        parts: list[tuple[str, Projection | None]] = [("attention", block.attention.merged)]
        if block.feed is not None and block.feed.dense:
            inner += [_std(p.weight) for p in block.feed.first]
            parts.append(("feed-forward", block.feed.down))
        for what, projection in parts:
            if projection is not None:
                name = projection.names[0] if projection.names else what
                matrix = projection.weight
                error = 5 / math.sqrt(2 * matrix.numel())
                outputs.append(Output(name, what, layer, _std(matrix), error, len(matrix), _is_uniform(matrix)))
    return outputs, sorted(inner), width


def output_projections(subject: Subject, recording: Recording) -> Iterator[Finding]:
    """Output projections start at std/√(2L) where that is declared, and all of them where some do."""
    layers = subject.facts.whole("n_layers")
    assert subject.module is not None
    if not layers or layers < 2 or not fresh(subject.module):
        yield Finding.skip(OUTPUTS, "the number of layers is not declared, or the weights are not fresh")
        return
    outputs, inner, width = _outputs(recording)
    if len(outputs) < 2 or not inner:
        yield Finding.skip(OUTPUTS, "output projections were not found")
        return
    usual = inner[len(inner) // 2]
    if inner[-1] > 1.3 * inner[0] or usual == 0:
        yield Finding.skip(
            OUTPUTS, "the matrices that read the stream differ in size, so there is no size to compare with"
        )
        return
    wanted = usual / math.sqrt(2 * layers)
    declared = declares_scaled_outputs(subject)

    def near(one: Output, size: float) -> bool:
        return abs(one.size / size - 1) < TOLERANCE + one.error

    def by_width(one: Output) -> bool:
        """Whether this is the size that goes by the width of what a matrix reads: torch's own, LeCun's or He's."""
        gain = usual * math.sqrt(width)
        known = any(abs(gain / rule - 1) < TOLERANCE for rule in (1, math.sqrt(2)))
        return near(one, gain / math.sqrt(one.width)) and (one.uniform or known)

    scaled = [one for one in outputs if near(one, wanted) and (declared or not by_width(one))]
    plain = [one for one in outputs if near(one, usual)]
    wrong = next((one for one in (outputs if declared else plain) if one not in scaled), None)
    if wrong is None or not (declared or scaled):
        rule = f"std/√(2L) = {wanted:.3g}" if scaled else "the size of the other matrices (no rule is declared)"
        yield Finding(OUTPUTS, Verdict.PASS, why=f"output projections start at {rule}")
        return
    reason = "is declared" if declared else f"{len(scaled)} of {len(outputs)} output projections have"
    why = (
        f"{wrong.name} ({wrong.what} output of layer {wrong.layer}) starts at {wrong.size:.3g}, not at "
        f"std/√(2L) = {wanted:.3g}, which {reason}"
    )
    remedy = "Scale the output projections of attention and feed-forward by 1/√(2L), matching their qualified names."
    evidence = {"layer": wrong.layer, "module": wrong.name}
    yield Finding(OUTPUTS, Verdict.FAIL, wrong.size, wanted, why, remedy, evidence)


def head(subject: Subject, recording: Recording) -> Finding:
    """The head starts no larger than declared."""
    std, matrix = subject.facts.number("init_std"), recording.anatomy.head
    assert subject.module is not None
    if std is None or matrix is None or not fresh(subject.module) or subject.interface.library:
        return Finding.skip(HEAD, "no initial size is declared, or the weights are not fresh")
    _, inner, _ = _outputs(recording)
    if not inner or not 0.8 < inner[len(inner) // 2] / std < 1.25:
        return Finding.skip(
            HEAD, "the other matrices do not have the declared initial size, so it is not the rule here"
        )
    size, name = _std(matrix.weight), matrix.names[0] if matrix.names else "the head"
    width = matrix.weight.shape[0]
    why = (
        f"{name} starts at standard deviation {size:.3g}, declared is {std:.3g}: after a norm its logits have "
        f"{size * width**0.5:.2g} instead of {std * width**0.5:.2g}, and the first loss lies "
        f"{size**2 * width / 2:.2g} nats above ln V"
    )
    remedy = "Initialise the head (or the tied table) like the other matrices, or with zeros."
    return Finding.judge(HEAD, size, LARGE_HEAD * std, why, remedy, module=name)
