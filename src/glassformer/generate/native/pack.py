"""A model's weights as the kernels read them.

In float32 the kernels read the parameters themselves: nothing is copied, and a changed weight is seen at once. In
bfloat16, int8 and int4 they read a packed copy, in huge pages where the system has them.
"""

import ctypes
import mmap
import sys
from typing import Literal

import torch
from torch import Tensor, nn

from glassformer.generate.native.structures import Matrix, Norm
from glassformer.model.norm import LayerNorm, RMSNorm

Precision = Literal["float32", "bfloat16", "int8", "int4"]
KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
GROUPS = {"int8": (256, 128, 64), "int4": (64,)}
"""Columns that share a scale: the largest that divides a row. Fewer scales are less to read, more are more exact."""
_LARGEST = {"int8": 127, "int4": 7}
_SPAN = {"int8": 64, "int4": 128}
"""Columns that are packed together: a row must be whole numbers of them."""
_LINE = 64


class Store:
    """One stretch of memory that packed weights are copied into.

    Reading hundreds of megabytes per token walks through as many thousand ordinary pages, each of which must be looked
    up; huge pages are five hundred times larger.
    """

    def __init__(self, n_bytes: int):
        self.memory = mmap.mmap(-1, n_bytes + mmap.PAGESIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = 0
        self.held: list[Tensor] = []
        """What the structures point into."""

    def keep(self, tensor: Tensor) -> int:
        """Copy a tensor in; returns its address."""
        flat = tensor.detach().contiguous().flatten()
        size = flat.numel() * flat.element_size()
        kept = torch.frombuffer(self.memory, dtype=flat.dtype, count=flat.numel(), offset=self.used)
        kept.copy_(flat)
        self.held.append(kept)
        self.used += -(-size // _LINE) * _LINE
        return int(kept.data_ptr())

    def refer(self, tensor: Tensor | None) -> int | None:
        """The address of a float32 tensor itself, kept alive; of a copy where it is laid out or typed otherwise."""
        if tensor is None:
            return None
        plain = tensor.detach().float().contiguous()  # itself when it is both already
        self.held.append(plain)
        return int(plain.data_ptr())


_HUGE = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: huge pages now, for memory that is there already."""


def collapse(first: int, last: int) -> bool:
    """Ask for huge pages from address `first` to `last`; whether the system gave them. Nothing else changes."""
    first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
    if not sys.platform.startswith("linux") or last <= first:
        return False
    size = ctypes.c_size_t(last - first)
    return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, _COLLAPSE)) == 0


def room(weights: list[Tensor], precision: Precision) -> int:
    """Bytes that packing these matrices takes, at most."""
    if precision == "float32":
        return 0
    return sum(2 * w.numel() + 4 * w.numel() // 64 + 4 * _LINE for w in weights)


def quantise(weight: Tensor, group: int, precision: Precision = "int8") -> tuple[Tensor, Tensor]:
    """Whole numbers and their scales (rows, columns / group): w = q * scale, scale = max|w| of the group / 127 or 7."""
    largest = _LARGEST[precision]
    parts = weight.float().unflatten(1, (-1, group))
    scales = parts.abs().amax(-1).clamp(min=1e-30) / largest
    whole = (parts / scales[..., None]).round().clamp(-largest, largest)
    return whole.to(torch.int8).flatten(1), scales


def group_of(columns: int, precision: Precision = "int8") -> int | None:
    """The columns of a group, or None where rows of this length are not packed so."""
    if precision not in GROUPS or columns % _SPAN[precision]:
        return None
    return next(g for g in GROUPS[precision] if columns % g == 0)


def packed_as(columns: int, precision: Precision) -> Precision:
    """int4 wants rows of whole 128 columns, int8 of 64; others are kept one step more exact."""
    if precision == "int4" and group_of(columns, "int4") is None:
        precision = "int8"
    if precision == "int8" and group_of(columns, "int8") is None:
        precision = "bfloat16"
    return precision


def neighbours(weight: Tensor) -> Tensor:
    """bfloat16 rows with columns i and 16 + i of each whole 32 side by side, as the kernel's words hold them."""
    whole = weight.shape[1] // 32 * 32
    paired = weight[:, :whole].unflatten(1, (-1, 2, 16)).transpose(2, 3).flatten(1)
    return torch.cat([paired, weight[:, whole:]], 1)


def halves(whole: Tensor) -> Tensor:
    """int4 rows: of each 128 columns the first 64 in the low halves of 64 bytes, the others in the high ones."""
    low, high = (whole + 8).to(torch.uint8).unflatten(1, (-1, 2, 64)).unbind(2)
    return (low | high << 4).flatten(1)


def matrix(store: Store, weight: Tensor, bias: Tensor | None, precision: Precision) -> Matrix:
    """A matrix for the kernels."""
    weight = weight.detach()
    made = Matrix(rows=weight.shape[0], columns=weight.shape[1], bias=store.refer(bias))
    precision = packed_as(weight.shape[1], precision)
    made.kind = KINDS[precision]
    if precision == "float32":
        made.weights = store.refer(weight)
    elif precision == "bfloat16":
        made.weights = store.keep(neighbours(weight.to(torch.bfloat16)))
    else:
        group = group_of(weight.shape[1], precision)
        assert group is not None
        whole, scales = quantise(weight, group, precision)
        made.group = group
        stored = halves(whole) if precision == "int4" else (whole.to(torch.int16) + 128).to(torch.uint8)
        made.weights, made.scales = store.keep(stored), store.keep(scales)
    return made


def linear(store: Store, module: nn.Linear, precision: Precision) -> Matrix:
    return matrix(store, module.weight, module.bias, precision)


def norm(store: Store, module: LayerNorm | RMSNorm | None) -> Norm:
    """A norm for the kernels; none is one without weights."""
    if module is None:
        return Norm()
    bias = getattr(module, "bias", None)
    weight, shift = store.refer(module.weight), store.refer(bias)
    return Norm(weight=weight, bias=shift, eps=module.eps, centred=isinstance(module, LayerNorm))


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
