"""All experts of a mixture in one grouped matmul, for training on a GPU.

The engine calls one expert after another and asks the GPU each time how many tokens it has, so the host waits E times a
layer, and the step cannot be captured. Here pairs of token and expert are sorted by expert, and `F.grouped_mm`
multiplies the rows of each expert with that expert's matrix: a fixed number of kernels, whose sizes do not depend on
the routing.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.replacement import Replacement
from glassformer.model import Model
from glassformer.model.layers import Gated
from glassformer.model.moe import MoE
from glassformer.shapes import Float, Int

MULTIPLE = 8
"""Rows of the matrices must have a multiple of 16 bytes."""


def unsupported_device(device: torch.device) -> str | None:
    """Return why a device has no grouped matmul that the host need not wait for, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "grouped matmuls without waiting need a GPU of compute capability 9.0 or later"
    return None


class _Reorder(torch.autograd.Function):
    """x[order] for a permutation. The gradient is read through the inverse permutation; torch's own adds atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


class GroupedMoE(MoE):
    """A MoE whose training steps compute all experts together. In evaluation it is a MoE."""

    def mix(
        self, x: Float[Tensor, "*n D"], gates: Float[Tensor, "*n A"], choice: Int[Tensor, "*n A"]
    ) -> Float[Tensor, "*n D"]:
        if not self.training:
            return MoE.mix(self, x, gates, choice)
        chosen = choice.flatten()  # (nA,), the expert of each pair
        order = chosen.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.zeros(len(self.experts), dtype=torch.int32, device=x.device)
        ends = ends.scatter_add(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        pairs = x.flatten(0, -2)[:, None].expand(-1, self.n_active, -1).flatten(0, 1)  # (nA, D)
        rows = _Reorder.apply(pairs, order, inverse)
        values = _Reorder.apply(self.compute(rows, ends, chosen[order]), inverse, order)
        weighted = values.view(*gates.shape, -1) * gates[..., None]
        return weighted.sum(-2).to(x.dtype)

    def compute(
        self, rows: Float[Tensor, "m D"], ends: Int[Tensor, "E"], expert: Int[Tensor, "m"]
    ) -> Float[Tensor, "m D"]:
        """Return each row's output of its expert. Rows are sorted by expert; those of expert e end at ends[e]."""
        first = self.experts[0]
        if isinstance(first, Gated):
            gate, up = self.linear(("gate", "up"), rows, ends, expert).chunk(2, -1)
            hidden = first.activation(first.limited_gate(gate)) * first.factor(up)
        else:
            hidden = first.activation(self.linear(("up",), rows, ends, expert))  # type: ignore[operator]
        return self.linear(("down",), hidden, ends, expert)

    def linear(
        self, names: tuple[str, ...], rows: Float[Tensor, "m i"], ends: Int[Tensor, "E"], expert: Int[Tensor, "m"]
    ) -> Float[Tensor, "m o"]:
        """Apply these linear layers of each row's expert; their outputs lie next to each other."""
        dtype = (
            torch.get_autocast_dtype(rows.device.type) if torch.is_autocast_enabled(rows.device.type) else rows.dtype
        )
        layers: list[nn.Linear] = [getattr(module, name) for module in self.experts for name in names]
        matrices = torch.cat([layer.weight for layer in layers]).to(dtype).unflatten(0, (len(self.experts), -1))
        out = F.grouped_mm(rows.to(dtype), matrices.transpose(1, 2), offs=ends)
        if layers[0].bias is None:
            return out
        biases = torch.cat([layer.bias for layer in layers]).to(dtype).unflatten(0, (len(self.experts), -1))
        return out + biases[expert]


def replacements(model: Model) -> Iterator[Replacement]:
    """Yield every mixture of experts of a model."""
    for module in model.modules():
        if isinstance(module, MoE):
            yield Replacement(module, GroupedMoE)
