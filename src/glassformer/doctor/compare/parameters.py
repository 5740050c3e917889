"""The weights of two models compared, where they go by the same names."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glassformer.anatomy.fits import distance


@dataclass(frozen=True)
class ParameterGap:
    """A parameter that differs, and how."""

    name: str
    text: str
    difference: float

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "text": self.text, "difference": self.difference}


def parameter_gaps(a: nn.Module | None, b: nn.Module | None, coarse: torch.dtype) -> list[ParameterGap] | None:
    """Parameters that differ beyond the rounding of `coarse`, in A's order; None where names are not the same."""
    if a is None or b is None:
        return None
    one, two = (_plain(m) for m in (a, b))
    if not one or one.keys() != two.keys():
        return None
    found = []
    for name, mine in one.items():
        x, y = (t.detach().cpu().to(coarse).double() for t in (mine, two[name]))
        if x.shape == y.shape and torch.equal(x, y):
            continue
        found.append(ParameterGap(name, _how(x, y), distance(x, y)))
    return found


def _plain(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("_orig_mod."): t for n, t in model.state_dict().items() if t.is_floating_point()}


def _how(x: Tensor, y: Tensor) -> str:
    if x.shape != y.shape:
        if x.dim() == 2 and x.T.shape == y.shape and torch.equal(x.T, y):
            return f"transposed: {tuple(x.shape)} in A, {tuple(y.shape)} in B"
        return f"of shape {tuple(x.shape)} in A and {tuple(y.shape)} in B"
    if x.dim() == 2 and x.shape[0] == x.shape[1] and torch.equal(x.T, y):
        return "transposed"
    if x.dim() >= 1 and torch.equal(_sorted_rows(x), _sorted_rows(y)):
        return "the same rows in another order"
    if torch.equal(x.flatten().sort().values, y.flatten().sort().values):
        return "the same numbers at other indices"
    apart = (x != y).sum()
    return f"other numbers at {int(apart)} of {x.numel()} entries"


def _sorted_rows(x: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], -1)
    # a fixed random projection distinguishes rows: exact rows give exact sums
    direction = torch.linspace(1.0, 2.0, flat.shape[1], dtype=flat.dtype)
    return flat[(flat * direction).sum(1).argsort()]
