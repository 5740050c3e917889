"""Modules of the model whose training steps run in the compiled CPU kernels. Everything else is the engine's."""

from collections.abc import Iterator

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels.cpu.training.functions import attention, feed_forward
from glassformer.kernels.replacement import Replacement
from glassformer.model import NO_TAP, Model, Tap
from glassformer.model.attention import Attention
from glassformer.model.context import AttentionContext
from glassformer.model.layers import Dense


def supports_call(x: Tensor, *parameters: Tensor) -> bool:
    """Return whether input and parameters are float32 and autocast is off."""
    autocast = torch.is_autocast_enabled("cpu")
    return not autocast and x.numel() > 0 and all(t.dtype is torch.float32 for t in (x, *parameters))


class NativeAttention(Attention):
    """Attention whose heads are computed by a kernel in training, without dropout and without a mask."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, tap: Tap, after: Tensor | None = None
    ) -> Tensor:
        known = q.dtype is k.dtype is v.dtype and q.dtype in (torch.float32, torch.bfloat16)
        watched = any(tap.wants(site) for site in ("scores", "pattern"))
        plain = known and context.mask is None and not self.dropout and 0 not in (q.numel(), k.numel())
        if not self.training or watched or not plain:
            return super().attend(q, k, v, context, tap, after)
        heads = attention(tap("q", q), tap("k", k), tap("v", v), self.scale, context.is_causal)
        return tap("out", self.o(tap("heads", heads).transpose(1, 2).flatten(2)))


class NativeDense(Dense):
    """A feed-forward whose training step in float32 is one kernel: both matmuls and the GELU between them.

    With a tap inside it is a Dense. In bfloat16 torch's matmuls reach the speed of the processor.
    """

    tanh: bool

    def forward(self, x: Tensor, tap: Tap) -> Tensor:
        if not self.training or tap is not NO_TAP or not supports_call(x, self.up.weight):
            return super().forward(x, tap)
        return feed_forward(x, self.up.weight, self.up.bias, self.down.weight, self.down.bias, self.tanh)


def attention_replacements(model: Model) -> Iterator[Replacement]:
    """Yield every attention of a model, cross-attention included."""
    yield from (Replacement(m, NativeAttention) for m in model.modules() if type(m) is Attention)


def dense_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the dense feed-forwards of a model, experts included."""
    part = model.config.feedforward
    spec = part.expert if isinstance(part, c.MoE) else part
    assert isinstance(spec, c.Dense)
    attributes = {"tanh": spec.activation == "gelu_tanh"}
    yield from (Replacement(m, NativeDense, attributes) for m in model.modules() if type(m) is Dense)
