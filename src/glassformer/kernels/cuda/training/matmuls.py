"""Matmuls of a training step in bfloat16 by the fastest algorithm of cuBLASLt (toolchain/cublas.py).

A linear layer under autocast: x and W are cast, y = x W^T + b, dx = dy W, dW = dy^T x. Every matmul is in bfloat16 with
sums in float32, as in torch. In a feed-forward with GELU, the epilogue of the first matmul computes the GELU, and the
epilogue of its gradient multiplies by the derivative. Where cuBLASLt is not available, torch computes the matmuls.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.replacement import Replacement
from glassformer.kernels.toolchain import cublas
from glassformer.model import Model
from glassformer.model.block import Block
from glassformer.model.context import Tap
from glassformer.model.layers import Dense
from glassformer.shapes import Float

READY = cublas.available()
"""True if this machine has cuBLASLt with the functions that the matmuls need."""


@torch.library.custom_op("glassformer::matmul", mutates_args=())
def matmul(left: Tensor, right: Tensor, left_transposed: bool, right_transposed: bool, bias: Tensor | None) -> Tensor:
    """Return left right + bias. A matrix whose flag `transposed` is set is given as its transpose."""
    y = (left.T if left_transposed else left).float() @ (right.T if right_transposed else right).float()
    return (y if bias is None else y + bias.float()).to(left.dtype)


@matmul.register_fake
def _(left: Tensor, right: Tensor, left_transposed: bool, right_transposed: bool, bias: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[int(left_transposed)], right.shape[int(not right_transposed)])


@matmul.register_kernel("cuda")
def _(left: Tensor, right: Tensor, left_transposed: bool, right_transposed: bool, bias: Tensor | None) -> Tensor:
    return cublas.multiply(left, right, left_transposed, right_transposed, bias)


def multiply(
    left: Tensor,
    right: Tensor,
    left_transposed: bool = False,
    right_transposed: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the same, by torch where cuBLASLt does not support the operands."""
    if READY and left.dtype is torch.bfloat16 and cublas.suits(left, right):
        return matmul(left, right, left_transposed, right_transposed, bias)
    y = (left.T if left_transposed else left) @ (right.T if right_transposed else right)
    return y if bias is None else y + bias


@torch.library.custom_op("glassformer::gelu_matmul", mutates_args=())
def gelu_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (gelu(pre), pre) with pre = x weight^T + bias and the tanh form of GELU."""
    pre = matmul(x, weight, False, True, bias)
    return F.gelu(pre.float(), approximate="tanh").to(pre.dtype), pre


@gelu_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@gelu_matmul.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    pre = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return cublas.multiply(x, weight, False, True, bias, finish="gelu", kept=pre), pre


@torch.library.custom_op("glassformer::gelu_backward_matmul", mutates_args=())
def gelu_backward_matmul(dy: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    """Return dy weight gelu'(pre): the gradient of pre, where dy is the gradient of weight gelu(pre)."""
    d_post = matmul(dy, weight, False, False, None)
    return torch.ops.aten.gelu_backward(d_post.float(), pre.float(), approximate="tanh").to(dy.dtype)


@gelu_backward_matmul.register_fake
def _(dy: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return torch.empty_like(pre)


@gelu_backward_matmul.register_kernel("cuda")
def _(dy: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return cublas.multiply(dy, weight, finish="gelu_slope", kept=pre)


def _sums(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return matmul(x, weight, False, True, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous()
        sums = _sums(dy) if ctx.biased else None
        return matmul(dy, weight, False, False, None), matmul(dy, x, True, False, None), sums


class _FeedForward(torch.autograd.Function):
    """down(gelu(up(x))), with GELU and its derivative in the epilogues of the matmuls."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_up: Tensor, b_up: Tensor | None, w_down: Tensor, b_down: Tensor | None
    ) -> Tensor:
        post, pre = gelu_matmul(x, w_up, b_up)
        ctx.save_for_backward(x, w_up, w_down, pre, post)
        ctx.biased = (b_up is not None, b_down is not None)
        return matmul(post, w_down, False, True, b_down)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w_up, w_down, pre, post = ctx.saved_tensors
        dy = gradients[0].contiguous()
        d_pre = gelu_backward_matmul(dy, w_down, pre)
        return (
            matmul(d_pre, w_up, False, False, None),
            matmul(d_pre, x, True, False, None),
            _sums(d_pre) if ctx.biased[0] else None,
            matmul(dy, post, True, False, None),
            _sums(dy) if ctx.biased[1] else None,
        )


def cast_to_bfloat16(x: Tensor) -> bool:
    """Return whether autocast to bfloat16 is on for the device of x."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16


def supports_call(x: Tensor, *weights: Tensor) -> bool:
    """Return whether cuBLASLt computes these matmuls: autocast to bfloat16, on a GPU, sizes that are multiples of 8."""
    return READY and cast_to_bfloat16(x) and x.is_cuda and all(size % 8 == 0 for w in weights for size in w.shape)


def _narrow(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.bfloat16()


def linear(
    x: Float[Tensor, "*n D"], weight: Float[Tensor, "O D"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*n O"]:
    """Return F.linear(x, weight, bias), for training under autocast."""
    if not supports_call(x, weight):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y: Tensor = _Linear.apply(rows, weight.bfloat16(), _narrow(bias))
        return y.unflatten(0, x.shape[:-1])


class TunedLinear(nn.Linear):
    """A linear layer whose training step uses the fastest matmul. In evaluation it is an nn.Linear."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n O"]:
        return linear(x, self.weight, self.bias) if self.training else nn.Linear.forward(self, x)


class TunedDense(Dense):
    """A dense feed-forward with GELU in the epilogues of its matmuls. Evaluated or with a tap inside, it is a Dense."""

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        up, down = self.up, self.down
        if not self.training or tap.wants("pre") or tap.wants("post") or not supports_call(x, up.weight, down.weight):
            return Dense.forward(self, x, tap)
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).bfloat16()
            y: Tensor = _FeedForward.apply(rows, *map(_narrow, (up.weight, up.bias, down.weight, down.bias)))
            return y.view(x.shape)


def linear_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the linear layers of all blocks. Experts are left out: they see another number of tokens in each step."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if not hasattr(block.feedforward, "router"):
            yield from (Replacement(m, TunedLinear) for m in block.modules() if type(m) is nn.Linear)


def dense_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the dense feed-forwards of all blocks."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if type(block.feedforward) is Dense:
            yield Replacement(block.feedforward, TunedDense)
