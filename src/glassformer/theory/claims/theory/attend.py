"""The engine's attention on given matrices, with its softmax or without.

Linear attention is the same computation with the scores instead of the pattern: a tap may return another tensor
than it was given, so the engine itself computes Q K^T V and no second implementation is needed.
"""

import torch
from torch import Tensor

from glassformer.model.attention import explicit_attention
from glassformer.model.context import NO_TAP, Tap
from glassformer.shapes import Float


class NoSoftmax:
    """A tap under which attention is linear: the pattern is the scores."""

    def __init__(self) -> None:
        self.scores: Tensor | None = None

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site.endswith("scores"):
            self.scores = value
        if site.endswith("pattern"):
            assert self.scores is not None, "scores come before the pattern"
            return self.scores
        return value

    def wants(self, site: str) -> bool:
        return site.endswith(("scores", "pattern"))


def attend(
    q: Float[Tensor, "T K"],
    k: Float[Tensor, "S K"],
    v: Float[Tensor, "S U"],
    scale: float = 1.0,
    linear: bool = False,
) -> Float[Tensor, "T U"]:
    """softmax(scale q k^T) v of one head in float64; `linear` leaves the softmax out."""
    tap: Tap = NoSoftmax() if linear else NO_TAP
    q, k, v = (x.to(torch.float64)[None, None] for x in (q, k, v))
    return explicit_attention(q, k, v, scale, tap=tap)[0, 0]


def numerical_rank(matrix: Float[Tensor, "T D"], tolerance: float = 1e-10) -> int:
    """Singular values above `tolerance` times the largest."""
    sigma = torch.linalg.svdvals(matrix.detach())
    return int((sigma > tolerance * sigma[0]).sum())
