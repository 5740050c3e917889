"""Watching one forward of a base model: what goes into its softmaxes and what comes out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.bugs import probes
from tests.bugs.bug import Bug


class Watch(TorchFunctionMode):
    """Softmax inputs, axes and outputs in order, the product before each, and the scales of fused kernels."""

    def __init__(self):
        super().__init__()
        self.inputs: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.products: list[Tensor] = []
        self.scales: list[float] = []
        self.last: Tensor | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul) and out.dim() == 4:
            self.last = out
        if func is torch.softmax:
            self.inputs.append(args[0])
            self.weights.append(out)
            self.products.append(self.last)
        if func is F.scaled_dot_product_attention:
            self.scales.append(kwargs["scale"])
        return out


@torch.no_grad()
def watch(model: nn.Module, *args: Tensor, **kwargs: object) -> Watch:
    with Watch() as seen:
        model(*args, **kwargs)
    return seen


def inputs(bug: Bug, length: int = 24) -> tuple[Tensor, ...]:
    """What a model of this kind is called with."""
    tokens = probes.rows(2, length)
    return (probes.rows(2, 11, seed=4), tokens) if bug.kind == "seq2seq" else (tokens,)
