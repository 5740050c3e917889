"""Parts of the model whose training steps run in the compiled kernels; everything else about them is the engine's."""

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.kernels.cpu.training.functions import WIDE, attention, feed_forward, linear
from glassformer.kernels.cpu.training.library import load
from glassformer.kernels.cuda.training.joined import JoinedAttention
from glassformer.kernels.toolchain.cxx import CompileError, is_intel, register_bits
from glassformer.model import NO_TAP, Model, Tap
from glassformer.model.attention import Attention
from glassformer.model.feedforward import Dense


def _plain(x: Tensor, *parameters: Tensor) -> bool:
    """Whether everything is float32, and nothing is to be cast."""
    narrow = torch.is_autocast_enabled("cpu")
    return not narrow and x.numel() > 0 and all(t.dtype is torch.float32 for t in (x, *parameters))


def _wide(layer: nn.Linear) -> bool:
    return layer.weight.shape[0] % WIDE == layer.weight.shape[1] % WIDE == 0


class NativeLinear(nn.Linear):
    """While training in float32 its products are our kernel's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not _plain(x, self.weight):
            return super().forward(x)
        return linear(x, [self.weight], [self.bias])[0]


class NativeAttention(JoinedAttention):
    """While training without dropout, and where no mask or bias is given, heads are computed by our kernel; in float32,
    where our products are to be used, queries, keys and values are, too."""

    multiplies: bool

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.q, self.k, self.v)
        if not self.multiplies or not all(_wide(layer) and _plain(x, layer.weight) for layer in layers):
            return tuple(layer(x) for layer in layers)
        return linear(x, [layer.weight for layer in layers], [layer.bias for layer in layers])

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout: float) -> Tensor:
        known = q.dtype is k.dtype is v.dtype and q.dtype in (torch.float32, torch.bfloat16)
        if not self.training or mask is not None or dropout or not known or 0 in (q.numel(), k.numel()):
            return super().kernel(q, k, v, mask, is_causal, dropout)
        return attention(q, k, v, self.scale, is_causal)


class NativeDense(Dense):
    """While training in float32, unwatched, both products and the GELU between them are one kernel.

    In bfloat16 torch's products are at the speed of the processor, and there is little to be gained.
    """

    tanh: bool

    def forward(self, x: Tensor, tap: Tap) -> Tensor:
        if not self.training or tap is not NO_TAP or not _plain(x, self.up.weight):
            return super().forward(x, tap)
        return feed_forward(x, self.up.weight, self.up.bias, self.down.weight, self.down.bias, self.tanh)


def pays() -> bool:
    """Whether attention was measured to be no slower so than torch's: with AVX2 and AVX-512 (docs/benchmarks.md)."""
    return register_bits() >= 256


def multiplies(config: c.ModelConfig) -> bool:
    """Whether products were, too. On Intel's processors torch's are faster (12 to 16 % of a step); on AMD's ours are
    with AVX-512, and with AVX2 those of a model 128 wide (10 to 18 %), but not of 256 and more."""
    return not is_intel() and (register_bits() == 512 or config.d_model <= 128)


def enable(model: Model, products: bool = True) -> bool:
    """Let the parts of a model that can, train in compiled kernels: attention, and, where `products`, linear layers and
    feed-forwards. False where there is no compiler."""
    config = model.config
    try:
        load()
    except CompileError:
        return False
    attends = config.d_head % WIDE == config.d_value % WIDE == 0
    spec = config.feedforward.expert if isinstance(config.feedforward, c.MoE) else config.feedforward
    feeds = isinstance(spec, c.Dense) and spec.activation in ("gelu", "gelu_tanh") and spec.d_ff % (2 * WIDE) == 0
    for module in model.modules():
        if type(module) is Attention and attends:
            module.__class__ = NativeAttention
            module.multiplies = products  # type: ignore[assignment]
            if products and _wide(module.o):
                module.o.__class__ = NativeLinear
        elif type(module) is Dense and products and feeds and config.d_model % WIDE == 0:
            module.__class__ = NativeDense
            module.tanh = spec.activation == "gelu_tanh"  # type: ignore[assignment, union-attr]
    return True
