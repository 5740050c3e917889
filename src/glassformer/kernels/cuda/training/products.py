"""Products of a training step in bfloat16 by the fastest algorithm of cuBLASLt (cublas.py), where that is there.

A linear layer under autocast: x and W are cast, y = x W^T + b, dx = dy W, dW = dy^T x, each product in bfloat16 with
sums in float32, as torch takes them. A GELU is taken where its argument is made, and its slope where its gradient is.
Elsewhere, and on other devices, they are torch's own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.cuda.training import gelu
from glassformer.kernels.toolchain import cublas
from glassformer.model import Model
from glassformer.model.block import Block
from glassformer.model.feedforward import Dense
from glassformer.model.tap import Tap
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


@torch.library.custom_op("glassformer::gelu_product", mutates_args=())
def gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gelu(pre), pre = x weight^T + bias), with the GELU of tanh."""
    pre = product(x, weight, False, True, bias)
    return F.gelu(pre.float(), approximate="tanh").to(pre.dtype), pre


@gelu_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@gelu_product.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    pre = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return cublas.multiply(x, weight, False, True, bias, finish="gelu", kept=pre), pre


@torch.library.custom_op("glassformer::gelu_slope_product", mutates_args=())
def gelu_slope_product(dy: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    """dy weight gelu'(pre): the gradient of pre, if dy is that of weight gelu(pre)."""
    d_post = product(dy, weight, False, False, None)
    return torch.ops.aten.gelu_backward(d_post.float(), pre.float(), approximate="tanh").to(dy.dtype)


@gelu_slope_product.register_fake
def _(dy: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return torch.empty_like(pre)


@gelu_slope_product.register_kernel("cuda")
def _(dy: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return cublas.multiply(dy, weight, finish="gelu_slope", kept=pre)


def _sums(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)


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
        sums = _sums(dy) if ctx.biased else None
        return product(dy, weight, False, False, None), product(dy, x, True, False, None), sums


class _FeedForward(torch.autograd.Function):
    """down(gelu(up(x))), with GELU and its slope taken where the products are made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_up: Tensor, b_up: Tensor | None, w_down: Tensor, b_down: Tensor | None
    ) -> Tensor:
        ctx.with_slope = gelu.suits(x, w_up)
        post, kept = (gelu.gelu_product if ctx.with_slope else gelu_product)(x, w_up, b_up)
        ctx.save_for_backward(x, w_up, w_down, kept, post)
        ctx.biased = (b_up is not None, b_down is not None)
        return product(post, w_down, False, True, b_down)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w_up, w_down, kept, post = ctx.saved_tensors
        dy = gradients[0].contiguous()
        if ctx.with_slope:
            d_pre = gelu.slope_product(dy, w_down.T.contiguous(), kept)
        else:
            d_pre = gelu_slope_product(dy, w_down, kept)
        return (
            product(d_pre, w_up, False, False, None),
            product(d_pre, x, True, False, None),
            _sums(d_pre) if ctx.biased[0] else None,
            product(dy, post, True, False, None),
            _sums(dy) if ctx.biased[1] else None,
        )


def cast_to_bfloat16(x: Tensor) -> bool:
    """Whether autocast is on where x is, and to what."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16


def _suited(x: Tensor, *weights: Tensor) -> bool:
    """Whether products with these weights are to be made here: under autocast, on a GPU, in whole units."""
    return READY and cast_to_bfloat16(x) and x.is_cuda and all(size % 8 == 0 for w in weights for size in w.shape)


def _narrow(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.bfloat16()


def linear(
    x: Float[Tensor, "*n D"], weight: Float[Tensor, "O D"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*n O"]:
    """F.linear, for training under autocast."""
    if not _suited(x, weight):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y: Tensor = _Linear.apply(rows, weight.bfloat16(), _narrow(bias))
        return y.unflatten(0, x.shape[:-1])


class TunedLinear(nn.Linear):
    """A linear layer whose training step takes the fastest products."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n O"]:
        return linear(x, self.weight, self.bias) if self.training else nn.Linear.forward(self, x)


class TunedDense(Dense):
    """A dense feed-forward with GELU whose training step takes it with the products. Looked at, it is a Dense."""

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        up, down = self.up, self.down
        if not self.training or tap.wants("pre") or tap.wants("post") or not _suited(x, up.weight, down.weight):
            return Dense.forward(self, x, tap)
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).bfloat16()
            y: Tensor = _FeedForward.apply(rows, *map(_narrow, (up.weight, up.bias, down.weight, down.bias)))
            return y.view(x.shape)


def enable(model: Model) -> None:
    """Let the linear layers of a model's blocks train so. Not experts': they see another number of rows each time."""
    activation = getattr(model.config.feedforward, "activation", None)
    for block in (m for m in model.modules() if READY and isinstance(m, Block)):
        if type(block.feedforward) is Dense and activation == "gelu_tanh":
            block.feedforward.__class__ = TunedDense
        if not hasattr(block.feedforward, "router"):
            for layer in (m for m in block.modules() if type(m) is nn.Linear):
                layer.__class__ = TunedLinear
