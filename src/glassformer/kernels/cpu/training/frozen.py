"""Matmuls with frozen matrices on a CPU: those of LoRA's base, and those of layers that `optim.freeze` names.

A frozen matrix is the same in every step. In bfloat16, autocast rounds it in each pass; here it is rounded once, and
the copy is kept, which gives the same bits. In float32 the matmul is oneDNN's, which is faster than the one that torch
calls on AMD processors with AVX-512, above all for outputs as wide as a vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from glassformer.kernels.replacement import Replacement
from glassformer.model import Model
from glassformer.model.adapters import AdaptedLinear, Matmul, matmul, matmul_dtype
from glassformer.sizing.step import FROZEN_ROWS

_kept: Any = WeakIdKeyDictionary()
"""Of each frozen parameter that a kernel multiplies by: its version and address when it was rounded, and the copy."""


def keep(parameter: Tensor) -> None:
    """Let `rounded` keep the copies of a frozen parameter."""
    _kept.setdefault(parameter, None)


def is_kept(parameter: Tensor) -> bool:
    """Return whether the parameter is frozen and a kernel multiplies by it."""
    return not parameter.requires_grad and parameter in _kept


def rounded(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in a dtype. The copy of a kept parameter is made once, and again if the parameter changes."""
    if dtype is parameter.dtype or not is_kept(parameter):
        return parameter.detach().to(dtype)
    state = parameter._version, parameter.data_ptr(), dtype
    held = _kept[parameter]
    if held is None or held[0] != state:
        held = _kept[parameter] = state, parameter.detach().to(dtype)
    copy: Tensor = held[1]
    return copy


def supports_onednn() -> bool:
    """Return whether torch has the operation that calls oneDNN's matmul in float32."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


WIDEST = 8192
"""Outputs that oneDNN computes at once. For 512 rows and 50,257 outputs, parts of this size reach 100 GFLOP/s on one
thread, oneDNN as a whole 90, and torch 67."""


def onednn_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b by oneDNN, for float32 tensors without gradients."""
    n_outputs, n_inputs = weight.shape
    if n_inputs > WIDEST:  # a sum over a vocabulary, for which torch's matmul is the faster one
        return matmul(x, weight, bias)
    multiply = torch.ops.mkldnn._linear_pointwise
    if n_outputs <= WIDEST:
        whole: Tensor = multiply(x, weight, bias, "none", [], "")
        return whole
    out = x.new_empty(len(x), n_outputs)
    for first in range(0, n_outputs, WIDEST):
        part = slice(first, first + WIDEST)
        out[:, part] = multiply(x, weight[part], None if bias is None else bias[part], "none", [], "")
    return out


def multiplier(x: Tensor, dtype: torch.dtype) -> Matmul:
    """Return the function that multiplies x by a matrix in this dtype."""
    return onednn_matmul if dtype is torch.float32 and x.numel() and supports_onednn() else matmul


class FrozenAdapted(AdaptedLinear):
    """A layer with an adapter whose frozen matrix is rounded once, and multiplied by oneDNN in float32."""

    def operand(self, x: Tensor) -> tuple[Tensor, Matmul]:
        dtype = matmul_dtype(x, self.base())
        return rounded(self.base(), dtype), multiplier(x, dtype)


class _FrozenMatmul(torch.autograd.Function):
    """x W^T + b with a frozen W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape = x.shape
        return onednn_matmul(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        d_x = onednn_matmul(gradient, weight.t(), None).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return d_x, None, gradient.sum(0) if ctx.needs_input_grad[2] else None


class FrozenLinear(nn.Linear):
    """A frozen linear layer whose matrix is rounded once, and multiplied by oneDNN in float32."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = matmul_dtype(x, self.weight)
        if self.weight.requires_grad or x.dim() < 2:
            return super().forward(x)
        if dtype is torch.float32 and x.dtype is dtype and multiplier(x, dtype) is onednn_matmul:
            out: Tensor = _FrozenMatmul.apply(x, self.weight, self.bias)
            return out
        return F.linear(x, rounded(self.weight, dtype), self.bias)


@dataclass(frozen=True)
class FrozenHead:
    """How the logits of a frozen head are computed: few rows at a time, whose logits stay in the cache."""

    multiply: Matmul
    dtype: torch.dtype
    rows: int = FROZEN_ROWS

    def prepare(self, weight: Tensor, stride: int) -> Tensor:
        """Return the matrix in the dtype of the matmuls. On a CPU it is not padded."""
        assert stride == len(weight)
        return rounded(weight, self.dtype)


def frozen_head(weight: Tensor, dtype: torch.dtype) -> FrozenHead | None:
    """Return how the logits of a head are computed, or None if no kernel was installed for it."""
    return FrozenHead(multiplier(weight, dtype), dtype) if is_kept(weight) else None


def frozen_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the frozen linear layers, and keep the copies of their matrices and of the head's."""
    for module in model.modules():
        if type(module) is AdaptedLinear and module.quantized is None:
            keep(module.base())
            yield Replacement(module, FrozenAdapted)
        elif type(module) is nn.Linear and not module.weight.requires_grad:
            keep(module.weight)
            yield Replacement(module, FrozenLinear)
    if model.head is not None:
        weight = model.embed.tokens.weight if model.head.weight is None else model.head.weight
        if not weight.requires_grad:
            keep(weight)
