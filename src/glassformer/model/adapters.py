"""Low-rank adapters of linear layers: LoRA (Hu et al. 2021), rank-stabilised LoRA (Kalajdzievski 2023), and DoRA.

LoRA computes W' x with W' = W + s B A, where W is frozen and s is alpha / R (rank-stabilised: alpha / sqrt(R)).
DoRA (Liu et al. 2024) scales each row of W' to a trained norm m: W'' = m / ||W'|| * W'. The norm of a row is taken
over its inputs, and its gradient is not computed (section 4.3 of that paper).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glassformer.model.moe import Router
from glassformer.model.nf4 import Quantized, quantize, quantized_linear
from glassformer.model.transformer import Model
from glassformer.shapes import Float


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer. Layers whose adapters hold the same tensor A share it in training, too."""

    A: Float[Tensor, "R I"]
    B: Float[Tensor, "O R"]
    scale: float
    """s, the factor on B A."""
    magnitude: Float[Tensor, "O"] | None = None
    """m of DoRA; None for LoRA."""
    stabilised: bool = False
    """True if s is alpha / sqrt(R). Only files distinguish it: they hold alpha."""

    def merge(self, weight: Float[Tensor, "O I"]) -> Float[Tensor, "O I"]:
        """Return the adapted matrix, computed in float64 and rounded once to the dtype of the weight."""
        return self.merge_exactly(weight).to(weight.dtype)

    def merge_exactly(self, weight: Float[Tensor, "O I"]) -> Float[Tensor, "O I"]:
        """Return the adapted matrix in float64."""
        merged = weight.double() + self.scale * (self.B.double() @ self.A.double())
        if self.magnitude is None:
            return merged
        return (self.magnitude.double() / _nonzero(merged.norm(dim=1)))[:, None] * merged


def _nonzero(norms: Float[Tensor, "O"]) -> Float[Tensor, "O"]:
    """Return norms by which one can divide. A row of zeros, such as that of a unit that died, has m = 0 and stays 0."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)


def scale_of(rank: int, alpha: float, stabilised: bool) -> float:
    """Return s: alpha / rank, or alpha / sqrt(rank)."""
    return alpha / math.sqrt(rank) if stabilised else alpha / rank


def matmul_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which x is multiplied by a matrix: that of the matrix, or under autocast its dtype.

    Autocast leaves float64 as it is.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (x.dtype, weight.dtype):
        return weight.dtype
    return torch.get_autocast_dtype(device)


Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function of x (N,I), a matrix W (O,I) and a bias (O,) or None that returns x W^T + b."""


def matmul(x: Float[Tensor, "N I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None) -> Tensor:
    """x W^T + b."""
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


class _LowRankLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T with a frozen W and b, in the dtype of W.

    Autograd would add the two outputs, and the two gradients of x, in passes of their own. Here the matmuls of the
    adapter add to what the matmuls of W have written. `multiply` is `matmul`, or a faster function for W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        scale: float,
        multiply: Matmul,
    ) -> Tensor:
        ctx.scale, ctx.shape, ctx.multiply, ctx.dtypes = scale, x.shape, multiply, (x.dtype, A.dtype, B.dtype)
        rows, A, B = x.flatten(0, -2).to(weight.dtype), A.to(weight.dtype), B.to(weight.dtype)
        out = multiply(rows, weight, None if bias is None else bias.to(weight.dtype))
        low = rows @ A.t()
        out.addmm_(low, B.t(), alpha=scale)
        ctx.save_for_backward(rows, weight, A, B, low)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, A, B, low = ctx.saved_tensors
        x_dtype, A_dtype, B_dtype = ctx.dtypes
        gradient = gradient.flatten(0, -2)
        d_low = gradient @ B
        d_A = d_B = d_x = None
        if ctx.needs_input_grad[3]:
            d_A = torch.addmm(A, d_low.t(), rows, beta=0, alpha=ctx.scale).to(A_dtype)
        if ctx.needs_input_grad[4]:
            d_B = torch.addmm(B, gradient.t(), low, beta=0, alpha=ctx.scale).to(B_dtype)
        if ctx.needs_input_grad[0]:
            d_x = ctx.multiply(gradient, weight.t(), None).addmm_(d_low, A, alpha=ctx.scale).view(ctx.shape).to(x_dtype)
        return d_x, None, None, d_A, d_B, None, None


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter. Its state dict has the names of the layer, and those of the adapter.

    The parameter `weight` is that of the layer, but reading the attribute gives the adapted matrix, so that code which
    uses the matrix itself (latent attention, the lens) computes with the adapter, too.
    """

    def __init__(self, layer: nn.Linear, adapter: Adapter, A: nn.Parameter, dropout: float, quantized: bool):
        nn.Module.__init__(self)
        self.stabilised = adapter.stabilised
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, adapter.scale
        frozen = layer.weight.detach()
        self.quantized: Quantized | None = quantize(frozen) if quantized else None
        self._parameters["weight"] = None if quantized else nn.Parameter(frozen, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.lora_A = A
        self.lora_B = nn.Parameter(adapter.B.to(frozen.device, copy=True))
        magnitude = adapter.magnitude
        self.lora_magnitude = None if magnitude is None else nn.Parameter(magnitude.to(frozen.device, copy=True))
        self.dropout = nn.Dropout(dropout)

    @property
    def weight(self) -> Float[Tensor, "O I"]:  # type: ignore[override]
        """The adapted matrix."""
        return self.adapter().merge(self.base())

    def base(self) -> Float[Tensor, "O I"]:
        """Return the frozen matrix."""
        if self.quantized is not None:
            return self.quantized.dequantize()
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def adapter(self, tensors: Mapping[str, Tensor] | None = None, name: str = "") -> Adapter:
        """Return the adapter as it is now. The tensors are those of the layer, not copies.

        With `tensors`, they are those of this state dict, in which the layer has this name.
        """
        kept = {
            own: parameter.detach() if tensors is None else tensors[f"{name}.{own}"]
            for own, parameter in self.named_parameters()
            if own.startswith("lora_")
        }
        return Adapter(kept["lora_A"], kept["lora_B"], self.scale, kept.get("lora_magnitude"), self.stabilised)

    def forward(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n O"]:
        if self._is_one_function(x):
            weight, multiply = self.operand(x)
            fused: Tensor = _LowRankLinear.apply(x, weight, self.bias, self.lora_A, self.lora_B, self.scale, multiply)
            return fused
        out = F.linear(x, self.operand(x)[0]) if self.quantized is None else quantized_linear(x, self.quantized)
        low = self.scale * F.linear(self.dropout(x), self.lora_A)  # scaled here, where it is smallest
        out = out + F.linear(low, self.lora_B)
        if self.lora_magnitude is not None:
            out = out * (self.lora_magnitude / self.row_norms()).to(out.dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def operand(self, x: Tensor) -> tuple[Float[Tensor, "O I"], Matmul]:
        """Return the frozen matrix in the dtype of the matmul with x, and the function that multiplies by it."""
        return self.base().to(matmul_dtype(x, self.base())), matmul

    def _is_one_function(self, x: Tensor) -> bool:
        """Return whether `_LowRankLinear` computes the layer: plain LoRA. A compiler fuses better."""
        plain = self.quantized is None and self.lora_magnitude is None and not (self.training and self.dropout.p)
        if not plain or torch.compiler.is_compiling() or x.dim() < 2:
            return False
        if torch.is_autocast_enabled(x.device.type) and x.device.type != "cpu":
            return False  # on a GPU the step is compiled
        wanted = matmul_dtype(x, self.base())
        return wanted != self.base().dtype or x.dtype == self.lora_A.dtype == wanted

    @torch.no_grad()
    def row_norms(self) -> Float[Tensor, "O"]:
        """Return the norm of each row of W + s B A. It is a constant in the gradient."""
        return _nonzero((self.base() + self.scale * (self.lora_B @ self.lora_A)).norm(dim=1))


def adaptable(model: Model) -> dict[str, nn.Linear]:
    """Return the linear layers that can have an adapter: all but routers and the gates of shared experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, Router) and not name.endswith(".shared_gate")
    }


def choose_layers(names: Iterable[str], targets: Literal["linear"] | tuple[str, ...]) -> list[str]:
    """Return the names of layers that the targets mean: all outside the head, or those that end with a target."""
    if isinstance(targets, str):
        return [name for name in names if not name.startswith("head.")]
    return [name for name in names if any(f".{name}".endswith(f".{target}") for target in targets)]


@torch.no_grad()
def fresh_adapters(
    model: Model,
    names: Iterable[str],
    rank: int,
    alpha: float,
    stabilised: bool,
    dora: bool,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Adapter]:
    """Return adapters that change nothing yet: A uniform in ±1/sqrt(I), B zero, and m the norms of the rows.

    `weights` is the state dict of a model that has no values of its own (device "meta"). Default: those of the model.
    """
    generator, scale = torch.Generator().manual_seed(seed), scale_of(rank, alpha, stabilised)
    made = {}
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        bound = layer.in_features**-0.5  # Kaiming-uniform with a = sqrt(5)
        A = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        weight = layer.weight if weights is None else weights[f"{name}.weight"]
        magnitude = weight.float().norm(dim=1) if dora else None
        if magnitude is not None and not magnitude.is_meta:
            magnitude = magnitude.cpu()
        made[name] = Adapter(A, torch.zeros(layer.out_features, rank), scale, magnitude, stabilised)
    return made


def attach(model: Model, adapters: Mapping[str, Adapter], dropout: float = 0.0, quantized: bool = False) -> None:
    """Freeze a model and give its layers adapters, in place. Only the adapters are trained.

    `quantized` stores the matrices of these layers in NF4.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    shared: dict[int, nn.Parameter] = {}
    for name, adapter in adapters.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if id(adapter.A) not in shared:
            shared[id(adapter.A)] = nn.Parameter(adapter.A.to(model.device, copy=True))
        parent, _, own = name.rpartition(".")
        adapted = AdaptedLinear(layer, adapter, shared[id(adapter.A)], dropout, quantized)
        setattr(model.get_submodule(parent), own, adapted.train(layer.training))


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by the names of their layers; empty if it has none."""
    return {name: module.adapter() for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def merged_state(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict of the model without adapters that computes the same.

    `tensors` holds the values of a model whose own tensors are distributed. Default: those of the model.
    """
    held = model.state_dict() if tensors is None else tensors
    state = {name: tensor for name, tensor in held.items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            weight = module.base().detach() if tensors is None else tensors[f"{name}.weight"]
            state[f"{name}.weight"] = module.adapter(tensors, name).merge(weight)
    return state
