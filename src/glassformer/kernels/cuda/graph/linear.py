"""Matmuls of a decode step (linear.cu): how the rows are distributed, and weights in 8 bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.cuda.graph import launches
from glassformer.kernels.cuda.graph.launches import OUTPUTS, WEIGHTS, Launch
from glassformer.model.layers import ACTIVATIONS, LayerNorm, RMSNorm
from glassformer.shapes import Float

ACTIVATION_NAMES = ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh", "quick_gelu")
"""In the order of their numbers in numbers.cuh."""
CHUNK = 64
"""Columns that a warp reads at a time: the inner dimension is a multiple of it."""
LARGEST_BATCH = 64
"""Vectors that the kernel multiplies at once."""
KERNEL_BATCH = 16
"""Vectors up to which the kernel is faster than cuBLAS, with weights in 16 bits (docs/benchmarks_history.md)."""
FUSED_NORM = 2
"""Up to so many vectors every block normalizes them itself; more are normalized once, by a kernel."""
REGISTERS = 16
"""Loads of 16 bytes that a thread keeps in flight."""


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


@dataclass(frozen=True)
class Operand:
    """A matrix (rows, columns) as the kernel reads it."""

    weight: Tensor
    bias: Float[Tensor, "rows"] | None = None
    scale: Float[Tensor, "rows"] | None = None
    """Of a quantised matrix: what each row is multiplied with."""


def operand(weight: Tensor, bias: Tensor | None, precision: str) -> Operand:
    """Return a matrix in the number format `precision`; bfloat16 and float16 are the stored weights themselves."""
    bias = None if bias is None else bias.detach().float()
    weight = weight.detach()
    if not WEIGHTS[precision]:
        return Operand(weight, bias)
    quantised, scale = quantise(weight, precision)
    return Operand(quantised, bias, scale)


def quantise(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits with one scale per row. Bytes of int8 are stored with 128 added."""
    rows = weight.float()
    largest = rows.abs().amax(1).clamp(min=1e-30)
    if precision == "fp8":
        scale = largest / 448  # the largest number of float8 e4m3
        return (rows / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), scale
    scale = largest / 127
    return ((rows / scale[:, None]).round() + 128).to(torch.uint8), scale


@dataclass(frozen=True)
class Shape:
    """What a matmul is compiled for."""

    batch: int
    """Vectors, of each pair of a vector and an expert 1."""
    rows: tuple[int, ...]
    columns: int
    out: str
    precision: str
    activation: int | None = None
    norm: int = -1
    """-1: x are operands. 0: x is the residual stream. 1, 2: its RMS norm, its layer norm."""
    experts: bool = False

    @property
    def loads(self) -> int:
        """Loads of 16 bytes per tile and chunk."""
        return 1 if WEIGHTS[self.precision] else 2

    def plan(self, processors: int) -> tuple[int, int, int]:
        """Return (tiles of a unit, warps that share a unit, blocks): processors and their warps are equally busy.

        A processor has the units of one block. As many warps share a unit as keep all warps of a block busy.
        """
        rows, choices = (self.rows[0], (2,)) if self.out == "gated" else (sum(self.rows), (1, 2, 3, 4))
        best: tuple[tuple[int, int], tuple[int, int, int]] | None = None
        for tiles in choices[: 2 if self.batch > 16 else 4]:
            units = ceil_div(rows, 8 if self.out == "gated" else 8 * tiles)
            each = ceil_div(units, processors)
            warps = launches.WARPS
            split = next((n for n in (1, 2, 4) if n * each >= warps), warps)
            cost = (each * tiles, ceil_div(each, warps // split) * tiles)
            if best is None or cost <= best[0]:
                best = cost, (tiles, split, min(units, processors))
        assert best is not None
        return best[1]

    def blocks(self, processors: int) -> int:
        return self.plan(processors)[2]

    def macros(self, processors: int) -> dict[str, int]:
        tiles, split, blocks = self.plan(processors)
        rows = (*self.rows, 0, 0)
        width = max(1, REGISTERS // (tiles * self.loads))
        made = {
            "OPERAND_IS_BF16": int(self.precision == "bfloat16"), "STORED": 0, "INNER": self.columns,
            "ROWS0": rows[0], "ROWS1": rows[1], "ROWS2": rows[2], "TILES": tiles, "B": self.batch,
            "VECTORS": -(-self.batch // 16), "WIDTH": width,
            "WEIGHTS": WEIGHTS[self.precision], "NORM": self.norm, "OUT": OUTPUTS[self.out],
            "EXPERTS": int(self.experts), "BLOCKS_AT_ONCE": 2,
            "BLOCKS_OF_PAIR": blocks, "SPLIT": split,
        }  # fmt: skip
        return made if self.activation is None else {**made, "ACTIVATION": self.activation}


def linear(
    x: Tensor, matrices: Sequence[Operand], shape: Shape, out: Tensor, processors: int,
    norm: "NormFactors | None" = None, **more: object,
) -> Launch:  # fmt: skip
    """Return the launch of out = W x for one or several matrices that share x."""
    given: dict[str, object] = {
        "x": x, "out": out, "factor": 1.0, "slots": 1,
        "weight": [m.weight for m in matrices], "bias": [m.bias for m in matrices],
        "scale": [m.scale for m in matrices], **more,
    }  # fmt: skip
    if norm is not None:
        given |= {"norm_weight": norm.weight, "norm_bias": norm.bias, "eps": norm.eps}
    return Launch("linear", "linear", shape.macros(processors), given, shape.blocks(processors))


def largest_batch(precision: str) -> int:
    """Return up to how many vectors the kernel computes the matmuls; cuBLAS has no weights in 8 bits with a scale."""
    return LARGEST_BATCH if WEIGHTS[precision] else KERNEL_BATCH


def library_matmul(
    x: Tensor, matrices: Sequence[Operand], out: str, into: Tensor, activation: int | None, more: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a function that computes the same as `linear` by cuBLAS and torch."""
    act = None if activation is None else ACTIVATIONS[ACTIVATION_NAMES[activation]]
    biases = [None if m.bias is None else m.bias.to(x.dtype) for m in matrices]
    splits = [m.weight.shape[0] for m in matrices]

    def compute() -> None:
        found = [F.linear(x, m.weight, bias) for m, bias in zip(matrices, biases, strict=True)]
        match out:
            case "float":
                for part, y in zip(into.split(splits, 1), found, strict=True):
                    part.copy_(y)
            case "activation":
                assert act is not None
                into.copy_(act(found[0]))
            case "gated":
                assert act is not None
                gate, up = found
                if more.get("limit"):
                    gate, up = gate.clamp(max=more["limit"]), up.clamp(-more["limit"], more["limit"])
                torch.mul(act(gate), up + more["up_offset"] if more.get("up_offset") else up, out=into)
            case "add":
                into.add_(found[0], alpha=more["factor"])
            case "logits":
                into.copy_(found[0])
                if more["factor"] != 1:
                    into.mul_(more["factor"])
                if more["softcap"]:
                    into.div_(more["softcap"]).tanh_().mul_(more["softcap"])
                more["best"].copy_(ordered_argmax(into))
            case _:
                raise ValueError(out)

    return compute


def ordered_argmax(logits: Tensor) -> Tensor:
    """Return the argmax of each row as `choose` reads it (vectors.cu): 2^32 - 1 - index in the low 32 bits."""
    return 0xFFFFFFFF - logits.argmax(-1)


@dataclass(frozen=True)
class NormFactors:
    """A norm as the kernels read it: float32, the offset added to the weight."""

    kind: int
    """0: none. 1: RMS norm. 2: layer norm."""
    eps: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None


def norm_factors(module: nn.Module | None) -> NormFactors:
    """Read a norm of the model; None and `Unchanged` are no norm."""
    if not isinstance(module, LayerNorm | RMSNorm):
        return NormFactors(0)
    weight = None if module.weight is None else (module.weight.detach().float() + module.offset).contiguous()
    bias = None if module.bias is None else module.bias.detach().float()
    return NormFactors(2 if isinstance(module, LayerNorm) else 1, module.eps, weight, bias)


def suits(module: nn.Module | None, dtype: torch.dtype) -> bool:
    """Return whether a layer is a plain linear layer that the kernel can read: no adapter, no 4-bit weights."""
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    fits = weight.shape[1] % CHUNK == 0 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return weight.dtype is dtype and fits
