"""What two sets of logits alone can say: where they differ, and whether one is the other in disguise."""

import torch
from torch import Tensor

from glassformer.anatomy.fits import distance, fit_factor
from glassformer.shapes import Bool, Float


def describe(a: Float[Tensor, "B T V"], b: Float[Tensor, "B T V"], real: Bool[Tensor, "B T"] | None = None) -> str:
    """One sentence on the first position that differs, the pattern over positions and rows, and a constant factor."""
    size = max(float(b.square().mean().sqrt()), 1e-300)
    apart = torch.nan_to_num((a - b).abs(), nan=float("inf")).amax(-1) / size  # (B, T)
    bad = apart > max(1e-9, float(apart.max()) * 1e-6)
    bad = bad if real is None else bad & real
    if not bool(bad.any()):
        return "the logits agree at every position"
    position = int(bad.any(0).nonzero()[0])
    clauses = [f"first at position {position} (row {int(bad[:, position].nonzero()[0])})"]
    T = bad.shape[1]
    ever = bad.any(0)
    if bool(ever.all()):
        clauses.append("at every position")
    elif not bool(ever[0]) and bool(ever[1:].all()):
        clauses.append("at every position but 0, which sees nothing but itself: attention or positions")
    elif bool(ever[-1]) and int(ever.sum()) < T:
        first = int(ever.nonzero()[0])
        clauses.append(
            f"from position {first} on" if bool(ever[first:].all()) else f"at {int(ever.sum())} of {T} positions"
        )
    else:
        clauses.append(f"at {int(ever.sum())} of {T} positions")
    rows = bad.any(1)
    if not bool(rows.all()):
        which = ", ".join(str(int(r)) for r in rows.nonzero())
        padded = real is not None and bool((~real).any(1)[rows].all())
        clauses.append(f"only in row {which}" + (", the padded one: padding is read differently" if padded else ""))
    factor, left = fit_factor(a, b)
    if left < 1e-6 and abs(factor - 1) > 1e-4:
        clauses.append(f"B's logits are A's times {factor:.6g}")
    elif distance(a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)) < 1e-6:
        clauses.append("by a constant per position, which no probability notices")
    elif distance(a.flip(1), b) < 1e-6:
        clauses.append("B's logits are A's in reverse order of positions")
    elif distance(a[:, :-1], b[:, 1:]) < 1e-6:
        clauses.append("B's logits are A's, one position later")
    elif distance(a[:, 1:], b[:, :-1]) < 1e-6:
        clauses.append("B's logits are A's, one position earlier")
    return "the logits differ " + ", ".join(clauses) + f"; at most {float(apart[bad].max()):.1e} of their size"
