"""How far apart two tensors may be, and why: the measuring rules that every check shares.

Same shape (the same computation on inputs that differ elsewhere): a correct model on a CPU is exact to the bit, so the
bound is 1e-7 of the logits' size. On other devices a sum may be added in another order at each call (atomic additions),
so the bound is at least 8 units in the last place of the dtype. Other shape (a cache, padding, another batch): rounding
differs, and how much is measured on the model itself: N = max |f(x[:t]) - f(x)[:t]| uses no cache and no mask. Correct
models stayed within 6 N, the faintest bug tried was at 200 N: the bound is 50 N.
"""

import math

import torch
from torch import Tensor

SAME_SHAPE = 1e-7
"""Times the logits' root mean square: an ulp of float32 is 1.2e-7 of a value, and correct models do not differ."""
REORDERED = 8.0
"""Units in the last place, times the logits' size: sums of one call that were added in another order."""
NOISE_FACTOR = 50.0
SAME_WHY = "the same computation on the same numbers: exact to the bit, with a guard of 1e-7 of the logits' size"
CROSS_WHY = "50 times the model's own rounding between lengths (prefix noise)"

RELATIVE = ("rotary", "alibi", "t5")
"""Position schemes in which only distances matter."""
SHIFT_BOUND = 2e-4
"""Of the logits' size: angles in float32 move logits by 1e-6 times the sharpness of attention."""
SHIFT_WHY = "distances stay the same; angles in float32 move logits by 1e-6 times the sharpness of attention"


def many(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def visible_keys(number: int) -> str:
    """`1 key is visible`, `2 keys are visible`."""
    return f"{many(number, 'key')} {'is' if number == 1 else 'are'} visible"


def rms(x: Tensor) -> float:
    """Root mean square over finite values."""
    x = x.detach()
    if x.numel():
        quick = float(x.square().mean(dtype=torch.float64).sqrt())
        if math.isfinite(quick):
            return quick
    x = x.double()
    x = x[torch.isfinite(x)]
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference; NaN against NaN and equal infinities are no difference, NaN against a number is infinite."""
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    quick = float((a.detach() - b.detach()).abs().max()) if a.is_floating_point() and a.dtype == b.dtype else math.nan
    if math.isfinite(quick):
        return quick
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
    return float(torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).max())


def same_shape_bound(logits: Tensor) -> float:
    relative = SAME_SHAPE if logits.device.type == "cpu" else max(SAME_SHAPE, REORDERED * ulp(logits.dtype))
    return relative * max(rms(logits), 1e-30)


def ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def cross_shape_bound(logits: Tensor, noise: float) -> float:
    """50 N; N at least one ulp of the logits' size, for a model whose prefixes happen to agree exactly."""
    return NOISE_FACTOR * max(noise, ulp(logits.dtype) * max(rms(logits), 1e-30))
