"""The same model on two devices: is each as exact as its dtype allows?

In float64 two devices agree, even where one of them has a wrong kernel for float32 or bfloat16, or multiplies float32
matrices in a shorter format (TF32). So each side is also compared with itself in float64, on the same weights. That is
its rounding error, which the arithmetic determines: counted in units in the last place of its dtype, it is about the
same on every device, because the same numbers are rounded equally often. Orders of summation differ, hence a factor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassformer.anatomy.fits import distance
from glassformer.doctor.compare.cases import Case, answers
from glassformer.doctor.subject.device import device_name
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding

FACTOR = 16.0
"""One side may have this many times the rounding error of the other, in units of its dtype. A sum of n numbers has an
error between log n and n roundings, depending on its order; TF32 in place of float32 is a factor of 2^13."""
LEAST = 1.0
"""Units in the last place. Below it an error is called one unit: a side may be exact by chance."""


@dataclass(frozen=True)
class Side:
    """One model: where and in which dtype it ran, and its rounding error relative to the size of its logits."""

    device: str
    dtype: torch.dtype
    error: float

    @property
    def units(self) -> float:
        """The error in units in the last place of the dtype."""
        return self.error / torch.finfo(self.dtype).eps

    def text(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.error:.1e} on {self.device} in {name} ({self.units:.1f} units in the last place)"


@dataclass(frozen=True)
class RoundingErrors:
    """The rounding errors of A and B, or why they could not be measured."""

    sides: tuple[Side, Side] | None
    reason: str = ""

    @property
    def finding(self) -> Finding:
        id = "rounding-error"
        if self.sides is None:
            return Finding.skip(id, self.reason)
        less, more = sorted(self.sides, key=lambda side: side.units)
        why = (
            f"the rounding error of the less exact side, in units in the last place: at most {FACTOR:g} times that of "
            "the other"
        )
        return Finding.judge(id, more.units, FACTOR * max(less.units, LEAST), why, REMEDY, device=more.device)

    @property
    def sound(self) -> bool:
        """Whether neither side has an error that its dtype does not explain; True where nothing was measured."""
        return self.sides is None or self.finding.passed

    def text(self) -> str:
        if self.sides is None:
            return f"rounding error: not measured, {self.reason}"
        a, b = (side.text() for side in self.sides)
        line = f"rounding error: A {a}; B {b}"
        if self.sound:
            return line
        worse = "A" if self.sides[0].units > self.sides[1].units else "B"
        return f"{line}. {worse} computes less exactly than its dtype allows. {REMEDY}"


REMEDY = (
    "Look for a shorter format in its matmuls (TF32: torch.backends.cuda.matmul.allow_tf32 = False), a cast to half "
    "precision, or a kernel of that device that is wrong in this dtype."
)


def rounding_errors(
    cases: list[Case],
    subjects: tuple[Subject, Subject],
    own: list[dict[str, Any]],
    exact: list[dict[str, Any]],
    coarse: torch.dtype,
) -> RoundingErrors:
    """Measure the rounding error of both sides: the largest of all cases. `own` and `exact` are their answers.

    `exact` was computed with weights rounded to the dtype `coarse`; a side with a finer dtype is asked again.
    """
    sides = []
    for subject, answer, precise in zip(subjects, own, exact, strict=True):
        if subject.module is None:
            return RoundingErrors(None, f"{subject.name} is no module and cannot be computed in float64")
        if subject.dtype is torch.float64:
            return RoundingErrors(None, f"{subject.name} is in float64, so there is nothing more exact to compare with")
        fine = precise if subject.dtype == coarse else answers(subject, cases, subject.dtype, exact=True)
        gaps = [_gap(case, answer[case.name], fine[case.name]) for case in cases]
        known = [gap for gap in gaps if gap is not None]
        if not known:
            reason = next((fine[c.name] for c in cases if isinstance(fine[c.name], str)), "no case could be asked")
            return RoundingErrors(None, f"float64 is not possible on {subject.device}: {reason}")
        sides.append(Side(device_name(subject.device), subject.dtype, max(known)))
    return RoundingErrors((sides[0], sides[1]))


def _gap(case: Case, one: Any, two: Any) -> float | None:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return None
    return distance(one, two) if case.real is None else distance(one[case.real], two[case.real])
