"""Weights that are stored quantised in safetensors files, dequantised with the formula of their source when read.

* `fp8` (DeepSeek-V3): `X.weight` in float8 and `X.weight_scale_inv`, one factor for each block of `weight_block_size`.
  The value is weight * factor.
* `mxfp4` (gpt-oss; Microscaling formats 1.0 of the Open Compute Project): `X_blocks` (..., groups, 16), two values in a
  byte, and `X_scales` (..., groups). The value is FP4[code] * 2^(scale - 127). The tensor is named `X` and has its last
  two dimensions exchanged, which is the layout of the same tensor in bfloat16.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import AGAIN, SafetensorsEntry, Stored, Tensors

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of FP4 (E2M1); the highest bit is the sign."""
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
ROWS = 1024
"""Rows of MXFP4 that are dequantised at a time, so that the float32 values of a whole tensor never exist."""


@dataclass(frozen=True)
class BlockScaled:
    """A float8 matrix with one scale for each block of rows and columns."""

    weight: Stored
    scale: Stored
    block: tuple[int, int]
    dtype: torch.dtype
    is_view = False

    @property
    def file(self) -> Path:
        return self.weight.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self) -> Tensor:
        weight, scale = self.weight.read(), _numbers(self.scale.read())
        out = torch.empty(self.shape, dtype=self.dtype)
        for row, factors in enumerate(scale):  # one row of blocks at a time: float32 values of all would take memory
            rows = slice(row * self.block[0], (row + 1) * self.block[0])
            part = weight[rows].float()
            out[rows] = part * factors.repeat_interleave(self.block[1])[: part.shape[1]]
        return out


def _numbers(scale: Tensor) -> Tensor:
    """Return scales in float32. Integers are exponents with a bias of 127 (E8M0)."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


@dataclass(frozen=True)
class Microscaled:
    """MXFP4: groups of 32 values of 4 bits with a common power of two; the low half of a byte comes first."""

    blocks: Stored
    scales: Stored
    dtype: torch.dtype
    is_view = False

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        *front, rows, groups, size = self.blocks.shape
        return (*front, groups * size * 2, rows)

    def read(self) -> Tensor:
        *front, rows, groups, size = self.blocks.shape
        blocks, scales = self.blocks.read().reshape(-1, groups, size), self.scales.read().reshape(-1, groups)
        table = torch.tensor(FP4, dtype=torch.float32)
        out = torch.empty(len(blocks), groups * size * 2, dtype=self.dtype)
        for start in range(0, len(blocks), ROWS):
            part = blocks[start : start + ROWS].int()
            values = torch.stack([table[part & 15], table[part >> 4]], dim=-1).flatten(2)
            exponents = scales[start : start + ROWS, :, None].int() - 127
            out[start : start + ROWS] = torch.ldexp(values, exponents).flatten(1)
        return out.view(*front, rows, -1).transpose(-1, -2)


def dequantize(tensors: Tensors | None, config: dict[str, Any], dtype: torch.dtype | None) -> Tensors | None:
    """Return the tensors with the quantised ones replaced by those that they stand for. Without tensors, only check.

    `config` is config.json. The values are computed in float32 and rounded to `dtype`. Default: the dtype that
    config.json names, or bfloat16.
    """
    quantization = config["quantization_config"]
    kind = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if kind not in ("fp8", "mxfp4"):
        raise WeightsError(
            f"config.json has quantization_config with quant_method={kind!r}, which is not known: only 'fp8' with "
            "block scales and 'mxfp4' are read, so dequantise the weights before loading."
        )
    if tensors is None:
        return None
    named = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
    dtype = dtype or named.get(str(config.get("dtype", config.get("torch_dtype"))), torch.bfloat16)
    stored = _block_scaled(tensors, quantization, dtype) if kind == "fp8" else _microscaled(tensors, dtype)
    return tensors.replace(stored)


def _block_scaled(tensors: Tensors, quantization: dict[str, Any], dtype: torch.dtype) -> dict[str, Stored]:
    block = quantization.get("weight_block_size", [128, 128])
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise WeightsError(
            f"config.json has weight_block_size={block!r} in quantization_config: only two sizes, such as [128, 128], "
            "are supported."
        )
    out: dict[str, Stored] = {}
    for name, tensor in tensors.stored.items():
        if name.endswith(SCALE):
            _partner(tensors, name, name.removesuffix(SCALE))
            continue
        if isinstance(tensor, SafetensorsEntry) and tensor.code.startswith("F8"):
            scale = _partner(tensors, name, name + SCALE)
            wanted = tuple(math.ceil(n / size) for n, size in zip(tensor.shape, block, strict=False))
            if len(tensor.shape) != 2 or scale.shape != wanted:
                raise WeightsError(
                    f"{tensor.file.name}: {name + SCALE} is {list(scale.shape)}, but {name} {list(tensor.shape)} in "
                    f"blocks of {block} needs {list(wanted)}: correct weight_block_size in config.json."
                )
            out[name] = BlockScaled(tensor, scale, (block[0], block[1]), dtype)
        else:
            out[name] = tensor
    return out


def _microscaled(tensors: Tensors, dtype: torch.dtype) -> dict[str, Stored]:
    out: dict[str, Stored] = {}
    for name, tensor in tensors.stored.items():
        if name.endswith(SCALES):
            _partner(tensors, name, name.removesuffix(SCALES) + BLOCKS)
        elif name.endswith(BLOCKS):
            scales = _partner(tensors, name, name.removesuffix(BLOCKS) + SCALES)
            if tensor.shape[:-1] != scales.shape or tensor.shape[-1:] != (16,):
                raise WeightsError(
                    f"{tensor.file.name}: {name} {list(tensor.shape)} must have 16 bytes for each of its scales "
                    f"{list(scales.shape)}: {AGAIN}."
                )
            out[name.removesuffix(BLOCKS)] = Microscaled(tensor, scales, dtype)
        else:
            out[name] = tensor
    return out


def _partner(tensors: Tensors, name: str, partner: str) -> Stored:
    if partner in tensors:
        return tensors.stored[partner]
    raise WeightsError(
        f"{tensors.stored[name].file.name} contains {name}, but no {partner}, which quantised weights need: {AGAIN}."
    )
