"""Products of a training step in bfloat16 by the fastest algorithm of cuBLASLt (cublas.py), where that is there.

A linear layer under autocast: x and W are cast, y = x W^T + b, dx = dy W, dW = dy^T x, each product in bfloat16 with
sums in float32, as torch takes them. Elsewhere, and on other devices, they are torch's own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import cublas
from glassformer.model import Model
from glassformer.model.block import Block
from glassformer.shapes import Float

READY = cublas.available()


@torch.library.custom_op("glassformer::product", mutates_args=())
def product(left: Tensor, right: Tensor, left_turned: bool, right_turned: bool, bias: Tensor | None) -> Tensor:
    """left right + bias; of a factor that is `turned` the transpose is given."""
    y = (left.T if left_turned else left).float() @ (right.T if right_turned else right).float()
    return (y if bias is None else y + bias.float()).to(left.dtype)


@product.register_fake
def _(left: Tensor, right: Tensor, left_turned: bool, right_turned: bool, bias: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[int(left_turned)], right.shape[int(not right_turned)])


@product.register_kernel("cuda")
def _(left: Tensor, right: Tensor, left_turned: bool, right_turned: bool, bias: Tensor | None) -> Tensor:
    return cublas.multiply(left, right, left_turned, right_turned, bias)


def multiply(
    left: Tensor, right: Tensor, left_turned: bool = False, right_turned: bool = False, bias: Tensor | None = None
) -> Tensor:
    """The same, by torch where cuBLASLt does not take them."""
    if READY and left.dtype is torch.bfloat16 and cublas.suits(left, right):
        return product(left, right, left_turned, right_turned, bias)
    y = (left.T if left_turned else left) @ (right.T if right_turned else right)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return product(x, weight, False, True, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous()
        sums = dy.sum(0, dtype=torch.float32).to(dy.dtype) if ctx.biased else None
        return product(dy, weight, False, False, None), product(dy, x, True, False, None), sums


def linear(
    x: Float[Tensor, "*n D"], weight: Float[Tensor, "O D"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*n O"]:
    """F.linear, for training under autocast."""
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    if not (READY and narrow and x.is_cuda and weight.shape[0] % 8 == weight.shape[1] % 8 == 0):
        return F.linear(x, weight, bias)
    with torch.autocast(device, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y: Tensor = _Linear.apply(rows, weight.bfloat16(), None if bias is None else bias.bfloat16())
        return y.unflatten(0, x.shape[:-1])


class TunedLinear(nn.Linear):
    """A linear layer whose training step takes the fastest products."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n O"]:
        return linear(x, self.weight, self.bias) if self.training else nn.Linear.forward(self, x)


def enable(model: Model) -> None:
    """Let the linear layers of a model's blocks train so. Not experts': they see another number of rows each time."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if READY and not hasattr(block.feedforward, "router"):
            for layer in (m for m in block.modules() if type(m) is nn.Linear):
                layer.__class__ = TunedLinear
