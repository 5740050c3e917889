"""Matmuls of a mixture of experts (linear.cu): each pair of a vector and a chosen expert is computed by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.kernels.cuda.graph.linear import Operand, Shape, linear
from glassformer.shapes import Int


def expert_linear(
    x: Tensor,
    experts: Sequence[Sequence[Operand]],
    shape: Shape,
    out: Tensor,
    choice: Int[Tensor, "B A"],
    processors: int,
    **more: Any,
) -> Launch:
    """Return the launch of out = W x for the expert that `choice` names for each pair. `experts` are their matrices."""
    tables = {field: _addresses(experts, field, x.device) for field in ("weight", "bias", "scale")}
    launch = linear(x, experts[0], shape, out, processors, choice=choice, **{**tables, **more})
    blocks = launch.blocks * choice.numel()
    return ExpertLaunch("linear", "linear", launch.macros, launch.given, blocks, shared=launch.shared, kept=experts)


@dataclass(frozen=True)
class ExpertLaunch(Launch):
    """A launch that keeps the matrices whose addresses are in its tables."""

    kept: Sequence[Sequence[Operand]] = ()


def _addresses(experts: Sequence[Sequence[Operand]], field: str, device: torch.device) -> list[Tensor | None]:
    """For each matrix of an expert, a table with the addresses of every expert's; None if the experts have none."""
    found = [[getattr(matrices[i], field) for matrices in experts] for i in range(len(experts[0]))]
    return [
        None if tensors[0] is None else torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
        for tensors in found
    ]
