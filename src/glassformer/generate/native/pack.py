"""A model's weights as the kernels read them.

In float32 the kernels read the parameters themselves: nothing is copied, and a changed weight is seen at once. In
bfloat16 and int8 they read a packed copy, in huge pages where the system has them.
"""

import ctypes
import mmap
from typing import Literal

import torch
from torch import Tensor, nn

from glassformer.generate.native.structures import Matrix, Norm
from glassformer.model.norm import LayerNorm, RMSNorm

Precision = Literal["float32", "bfloat16", "int8"]
KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
GROUPS = (128, 64, 32, 16)
"""Columns that share a scale: the largest that divides a row. Fewer scales are less to read, more are more exact."""
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


def room(weights: list[Tensor], precision: Precision) -> int:
    """Bytes that packing these matrices takes, at most."""
    if precision == "float32":
        return 0
    return sum(2 * w.numel() + 4 * w.numel() // GROUPS[-1] + 4 * _LINE for w in weights)


def quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """int8 weights and their scales (rows, columns / group): w = q * scale, scale = max|w| / 127 of the group."""
    parts = weight.float().unflatten(1, (-1, group))
    scales = parts.abs().amax(-1).clamp(min=1e-30) / 127
    whole = (parts / scales[..., None]).round().clamp(-127, 127)
    return whole.to(torch.int8).flatten(1), scales


def group_of(columns: int) -> int | None:
    return next((g for g in GROUPS if columns % g == 0), None)


def matrix(store: Store, weight: Tensor, bias: Tensor | None, precision: Precision) -> Matrix:
    """A matrix for the kernels. Rows that int8 cannot group (not a multiple of 16 columns) stay in bfloat16."""
    weight = weight.detach()
    made = Matrix(rows=weight.shape[0], columns=weight.shape[1], bias=store.refer(bias))
    group = group_of(weight.shape[1]) if precision == "int8" else None
    if precision == "float32":
        made.kind, made.weights = KINDS["float32"], store.refer(weight)
    elif group is None:
        made.kind, made.weights = KINDS["bfloat16"], store.keep(weight.to(torch.bfloat16))
    else:
        whole, scales = quantise(weight, group)
        made.kind, made.group = KINDS["int8"], group
        made.weights, made.scales = store.keep(whole), store.keep(scales)
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
