"""Both models at the activation where they differ, and what an explanation is."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.anatomy.fits import distance
from glassformer.anatomy.parts import Anatomy, Attention
from glassformer.anatomy.roles import Role
from glassformer.doctor.compare.conventions import CONVENTIONS

EXACT = 1e-6
"""An explanation must leave less than this (relative), or a thousandth of the difference it explains."""


@dataclass(frozen=True)
class Explanation:
    """Why A and B differ: an identifier of `CONVENTIONS`, what A and B do, and the part left unexplained."""

    convention: str
    text: str
    residual: float
    fault: str | None = None
    """The doctor's diagnosis for B if A is right, where the convention alone does not determine it."""

    @property
    def words(self) -> str:
        """Return the usual name of the convention."""
        known = CONVENTIONS.get(self.convention)
        return self.convention if known is None else known.words

    @property
    def diagnosis(self) -> str | None:
        """Return the doctor's diagnosis for B if A is right; None where nothing follows."""
        return self.fault or CONVENTIONS[self.convention].diagnosis

    def with_names(self, a: str, b: str) -> str:
        """Return the text with other names for A and B."""
        return re.sub(r"\b([AB])\b", lambda m: a if m.group(1) == "A" else b, self.text)

    def to_dict(self) -> dict[str, object]:
        return {"convention": self.convention, "text": self.text, "residual": self.residual}


@dataclass
class Scene:
    """Both models at the activation where they differ."""

    a: Role
    b: Role
    difference: float
    parts: tuple[Anatomy, Anatomy]
    exact: bool = True
    """Whether both ran in float64."""

    def explains(self, residual: float) -> bool:
        if not self.exact:
            return residual <= min(1e-4, self.difference * 0.05)
        return residual <= max(EXACT * 1e-3, min(EXACT, self.difference * 1e-3))


def named(value: float, s: Scene, attention: Attention | None = None) -> str:
    """A number, and what it is if it is something."""
    stream = s.parts[0].embedded
    D = None if stream is None else stream.shape[-1]
    known = {"1": 1.0}
    if D:
        known |= {"√D": D**0.5, "1/√D": D**-0.5}
    if attention is not None:
        H, K = attention.q.shape[1], attention.q.shape[3]
        known |= {"1/√H": H**-0.5, "1/K": 1 / K, "√K": K**0.5, "1/√K": K**-0.5}
    names = [name for name, number in known.items() if abs(value / number - 1) < 1e-6]
    return f"{value:.6g}" + (f" = {names[-1]}" if names and names != ["1"] else "")


def column_order(p: Tensor, q: Tensor) -> list[int] | None:
    """Which column of p each column of q is, where every one of them is one."""
    near = torch.cdist(q.T.contiguous(), p.T.contiguous())
    order = near.argmin(1)
    size = float(p.square().sum(0).mean().sqrt())
    worst = float(near.gather(1, order[:, None]).max())
    distinct = len(set(order.tolist())) == len(order)
    return order.tolist() if distinct and worst < EXACT * max(size, 1e-300) else None


def reordered(p: Tensor, q: Tensor) -> float | None:
    """What is left when the columns of p are brought into the order of q's; None where that is not what differs."""
    order = column_order(p, q)
    if order is None or order == list(range(p.shape[1])):
        return None
    return distance(p[:, order], q)
