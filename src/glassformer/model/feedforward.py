"""The position-wise part of a block: dense, gated, or a mixture of either (moe.py)."""

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.tap import Tap
from glassformer.shapes import Float

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact: x * Phi(x)
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class Dense(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, d_model: int, spec: c.Dense):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.bias)

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        hidden = self.activation(tap("pre", self.up(x)))
        return self.down(tap("post", hidden))


class Gated(nn.Module):
    """down(activation(gate(x)) * (up(x) + offset)), with both factors limited if there is a limit."""

    def __init__(self, d_model: int, spec: c.Gated):
        super().__init__()
        self.activation, self.limit, self.up_offset = ACTIVATIONS[spec.activation], spec.limit, spec.up_offset
        self.gate = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.bias)

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        # one expression: a name for a factor would keep its input alive
        hidden = self.activation(self.limited_gate(tap("pre", self.gate(x)))) * self.factor(self.up(x))
        return self.down(tap("post", hidden))

    def limited_gate(self, gate: Float[Tensor, "*n F"]) -> Float[Tensor, "*n F"]:
        return gate if self.limit is None else gate.clamp(max=self.limit)

    def factor(self, up: Float[Tensor, "*n F"]) -> Float[Tensor, "*n F"]:
        up = up if self.limit is None else up.clamp(-self.limit, self.limit)
        return up + self.up_offset if self.up_offset else up


def build_dense(d_model: int, spec: c.Dense | c.Gated) -> Dense | Gated:
    match spec:
        case c.Dense():
            return Dense(d_model, spec)
        case c.Gated():
            return Gated(d_model, spec)
        case _:
            assert_never(spec)
