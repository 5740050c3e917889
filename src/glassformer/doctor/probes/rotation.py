"""Which rotation a sequence of vectors went through: which components pair up, and by which angle per position."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassformer.shapes import Float

STILL = 1e-4
"""Of the largest component: the fastest pair of a rotation turns by far more, rounding of earlier layers by less."""


@dataclass
class Rotation:
    """`pairing` is `halves` (i with i + d/2), `interleaved` (2i with 2i + 1), or None: neither keeps its lengths."""

    pairing: str | None
    width: int
    """Rotated components R."""
    moves: bool
    """Whether the vectors differ from position to position at all."""
    angles: Float[Tensor, "R/2"] = field(default_factory=lambda: torch.empty(0))
    """|angle| of each pair between positions 0 and 1, in radians."""


def rotation_of(
    vectors: Float[Tensor, "T K"], fraction: float | None = None, dtype: torch.dtype | None = None
) -> Rotation:
    """Measure the rotation of one repeated vector at positions 0, 1, 2, ...: pairs keep their length, angles grow.

    `dtype` is the precision that the vectors were computed in, if it is less than their own.
    A factor on the whole vector, such as a temperature by position, is taken out first: it is no rotation.
    """
    x = vectors.double() / lengths(vectors)
    size = float(x.abs().max().clamp(min=1e-30))
    moved = (x - x[:1]).abs().amax(0)
    moving = (moved > 1e-6 * size).nonzero().flatten()
    if float(moved.max()) <= STILL * size:
        return Rotation(None, 0, False)
    width = x.shape[1]
    if fraction is not None and 0 < fraction < 1:
        width = int(x.shape[1] * fraction)
    elif len(moving) < width:
        # rotated components stand together, first or last among the others
        first = int(moving.min()) // 2 * 2
        x = x[:, first:]
        width = int(moving.max()) + 1 - first
        width += width % 2
    for pairing in ("halves", "interleaved"):
        a, b = split_pairs(x[:, :width], pairing)
        radii = (a**2 + b**2).sqrt()
        scale = float(radii.amax().clamp(min=1e-30))
        if float((radii - radii[:1]).abs().max()) <= max(1e-3, 4 * torch.finfo(dtype or vectors.dtype).eps) * scale:
            # cross and dot product of positions 0 and 1: exact for small angles too
            angle = torch.atan2(a[0] * b[1] - b[0] * a[1], a[0] * a[1] + b[0] * b[1]).abs()
            return Rotation(pairing, width, True, angle)
    return Rotation(None, width, True)


def lengths(vectors: Float[Tensor, "T K"]) -> Float[Tensor, "T 1"]:
    """The length of each vector over that of the first."""
    size = vectors.double().norm(dim=-1, keepdim=True)
    return (size / size[:1].clamp(min=1e-300)).clamp(min=1e-300)


def split_pairs(x: Float[Tensor, "T R"], pairing: str) -> tuple[Float[Tensor, "T R/2"], Float[Tensor, "T R/2"]]:
    """The two components of each pair."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half : 2 * half]) if pairing == "halves" else (x[..., 0::2], x[..., 1::2])
