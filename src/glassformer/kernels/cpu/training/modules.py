"""Modules of the model whose training steps run in the compiled CPU kernels. Everything else is the engine's."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.kernels.cpu.training.functions import WIDE, attention, feed_forward, linear
from glassformer.kernels.replacement import JoinedAttention, Replacement
from glassformer.model import NO_TAP, Model, Tap
from glassformer.model.attention import Attention
from glassformer.model.context import AttentionContext
from glassformer.model.layers import Dense


def supports_call(x: Tensor, *parameters: Tensor) -> bool:
    """Return whether input and parameters are float32 and autocast is off."""
    autocast = torch.is_autocast_enabled("cpu")
    return not autocast and x.numel() > 0 and all(t.dtype is torch.float32 for t in (x, *parameters))


def has_supported_widths(layer: nn.Linear) -> bool:
    """Return whether both widths of a layer are multiples of the vector width of the kernels."""
    return layer.weight.shape[0] % WIDE == layer.weight.shape[1] % WIDE == 0


class NativeLinear(nn.Linear):
    """A linear layer whose training step in float32 is one kernel call."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not supports_call(x, self.weight):
            return super().forward(x)
        return linear(x, [self.weight], [self.bias])[0]


class NativeAttention(JoinedAttention):
    """Attention whose heads are computed by a kernel in training, without dropout and without a mask.

    Where `projects` is set, and in float32, queries, keys and values are one kernel call, too.
    """

    projects: bool = False

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.q, self.k, self.v)
        if not self.projects or not all(
            has_supported_widths(layer) and supports_call(x, layer.weight) for layer in layers
        ):
            return tuple(layer(x) for layer in layers)
        return linear(x, [layer.weight for layer in layers], [layer.bias for layer in layers])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        known = q.dtype is k.dtype is v.dtype and q.dtype in (torch.float32, torch.bfloat16)
        watched = any(tap.wants(site) for site in ("scores", "pattern"))
        plain = known and context.mask is None and not self.dropout and 0 not in (q.numel(), k.numel())
        if not self.training or watched or not plain:
            return super().attend(q, k, v, context, tap)
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


def dense_spec(config: c.ModelConfig) -> c.Dense | c.Gated | c.NoFeedForward:
    """Return the feed-forward of a model, or of one of its experts."""
    return config.feedforward.expert if isinstance(config.feedforward, c.MoE) else config.feedforward


def attention_replacements(model: Model) -> Iterator[Replacement]:
    """Yield every attention of a model, cross-attention included."""
    yield from (Replacement(m, NativeAttention) for m in model.modules() if type(m) is Attention)


def linear_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the attention whose heads a kernel computes, to use the kernel for its projections as well."""
    for module in model.modules():
        if isinstance(module, NativeAttention):
            yield Replacement(module, NativeAttention, {"projects": True})
            if has_supported_widths(module.o):
                yield Replacement(module.o, NativeLinear)


def dense_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the dense feed-forwards of a model, experts included."""
    spec = dense_spec(model.config)
    assert isinstance(spec, c.Dense)
    attributes = {"tanh": spec.activation == "gelu_tanh"}
    yield from (Replacement(m, NativeDense, attributes) for m in model.modules() if type(m) is Dense)
