"""The weights of a model as the CPU kernels read them.

In float32 the kernels read float32 parameters in place: nothing is copied, and a changed weight is used at once. For
float16 and bfloat16 parameters they read an exact float32 copy. In bfloat16, int8 and int4 they read a packed copy, in
huge pages if the system has them.
"""

import contextlib
import ctypes
import math
import mmap
import sys
import weakref
from collections import deque
from typing import Literal

import torch
from torch import Tensor, nn

from glassformer.kernels.cpu.decode.library import Matrix, Norm
from glassformer.model.layers import LayerNorm, RMSNorm

Precision = Literal["float32", "bfloat16", "int8", "int4"]
KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
GROUPS = {"int8": (256, 128, 64), "int4": (64,)}
"""Columns that share a scale: the largest size that divides a row. Fewer scales are faster, more are more exact."""
_LARGEST = {"int8": 127, "int4": 7}
_LINE = 64
_WIDE = 32
"""Rows of a panel, as in operands.h."""
_BLOCK = 1 << 18
"""Elements of a matrix that are packed at once. Ten operations on more of them would wait for memory."""


_HUGE = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE (Linux 6.1): move existing memory to huge pages now."""
_RELEASED: deque[mmap.mmap] = deque(maxlen=2)
"""Memory of the keys and values of the last decoder, for the next one: the system would clear new memory, which takes
2 % of a prompt of 512 tokens."""
_MOST_RELEASED = 32 << 20
"""Bytes of such a piece."""


def stretch(n_bytes: int, reuses: bool = False) -> Tensor:
    """Return bytes that are aligned to a huge page and get huge pages when they are written.

    Reading hundreds of megabytes per token touches many thousand ordinary pages, each of which needs a TLB entry; huge
    pages are five hundred times larger. `reuses`: they may hold what such bytes held before; otherwise they are zero.
    """
    memory = None
    if reuses:
        with contextlib.suppress(IndexError):  # there is none
            memory = _RELEASED.pop()
    if memory is None or len(memory) < n_bytes + _HUGE:
        memory = _mapped(n_bytes + _HUGE)
    view = memoryview(memory)  # the tensor keeps it alive
    if reuses and len(memory) <= _MOST_RELEASED:
        weakref.finalize(view, _RELEASED.append, memory).atexit = False
    whole = torch.frombuffer(view, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + n_bytes]


def _mapped(n_bytes: int) -> mmap.mmap:
    # private: shared memory gets no huge pages if shmem_enabled is `never`, which is the usual setting
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, n_bytes, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of any value, in huge pages if there are enough of them."""
    size = dtype.itemsize * math.prod(shape)
    return torch.empty(shape, dtype=dtype) if size < _HUGE else stretch(size, reuses=True).view(dtype).view(shape)


class Store:
    """One block of memory that packed weights are copied to."""

    def __init__(self, n_bytes: int):
        self.memory = stretch(n_bytes)
        self.used = 0
        self.held: list[Tensor] = []
        """The tensors that the structures point to, kept alive."""
        self.converted: dict[int, tuple[Tensor, Tensor]] = {}
        """By address: a tensor of another dtype and its float32 copy, which tied weights share."""

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the next `count` elements of the block; their address is valid as long as the store."""
        size = count * dtype.itemsize
        taken = self.memory[self.used : self.used + size].view(dtype)
        self.held.append(taken)
        self.used += -(-size // _LINE) * _LINE
        return taken

    def refer(self, tensor: Tensor | None) -> int | None:
        """Return the address of a float32 tensor itself, kept alive; of a float32 copy of any other tensor."""
        if tensor is None:
            return None
        tensor = tensor.detach()
        known, plain = self.converted.get(tensor.data_ptr(), (None, None))
        if known is None or plain is None or known.shape != tensor.shape or known.stride() != tensor.stride():
            plain = tensor.float().contiguous()  # the tensor itself if it is both already
            if plain.data_ptr() != tensor.data_ptr():
                self.converted[tensor.data_ptr()] = tensor, plain
        self.held.append(plain)
        return int(plain.data_ptr())


def collapse(first: int, last: int) -> bool:
    """Ask for huge pages from address `first` to `last`; return whether the system provided them."""
    first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
    if not sys.platform.startswith("linux") or last <= first:
        return False
    size = ctypes.c_size_t(last - first)
    return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, _COLLAPSE)) == 0


def room(weights: list[Tensor], precision: Precision) -> int:
    """Return an upper bound of the bytes of these matrices when they are packed."""
    if precision == "float32":
        return 0
    return sum(_filled(w) * 2 + _filled(w) // 16 + 4 * _LINE for w in weights)


def _filled(weight: Tensor) -> int:
    """Return the elements of a matrix with its rows padded to whole panels and its columns to an even number."""
    rows, columns = weight.shape
    return -(-rows // _WIDE) * _WIDE * (columns + columns % 2)


def quantise(weight: Tensor, group: int, precision: Precision = "int8") -> tuple[Tensor, Tensor]:
    """Return integers q and scales (rows, columns / group): w = q * scale, scale = max|w| of the group / 127 or 7."""
    largest = _LARGEST[precision]
    parts = weight.float().unflatten(1, (-1, group))
    scales = parts.abs().amax(-1).clamp_(min=1e-30).div_(largest)
    whole = (parts / scales[..., None]).round_().clamp_(-largest, largest)
    return whole.to(torch.int8).flatten(1), scales


def group_of(columns: int, precision: Precision = "int8") -> int | None:
    """Return the columns of a group, or None if rows of this length cannot be quantised."""
    return next((g for g in GROUPS.get(precision, ()) if columns % g == 0), None)


def packed_as(columns: int, precision: Precision) -> Precision:
    """Return the precision of a matrix: int8 and int4 need a multiple of 64 columns, others become bfloat16."""
    return "bfloat16" if precision in GROUPS and group_of(columns, precision) is None else precision


def panels(weight: Tensor) -> Tensor:
    """Rearrange (rows, columns) to (rows / 32, columns, 32), padded with zeros."""
    missing = -weight.shape[0] % _WIDE
    filled = nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    return filled.unflatten(0, (-1, _WIDE)).transpose(1, 2)


def halves(whole: Tensor) -> Tensor:
    """Pack int4: of each 8 columns, the first four are the low halves of 4 bytes, the others the high halves."""
    low, high = (whole + 8).view(torch.int32).unflatten(1, (-1, 2)).unbind(2)  # four columns are one word
    return (low | high << 4).view(torch.uint8)


def matrix(store: Store, weight: Tensor, bias: Tensor | None, precision: Precision) -> Matrix:
    """Return a matrix for the kernels."""
    weight = weight.detach()
    made = Matrix(rows=weight.shape[0], columns=weight.shape[1], bias=store.refer(bias))
    precision = packed_as(weight.shape[1], precision)
    made.kind = KINDS[precision]
    if precision == "float32":
        made.weights = store.refer(weight)
        return made
    made.group = group_of(weight.shape[1], precision) or 0
    written: list[Tensor] = []
    for first in range(0, made.rows, rows := block_rows(made.columns)):
        parts = packed(weight[first : first + rows], made.group, precision)
        if not written:
            panel_rows = -(-made.rows // _WIDE)
            written = [store.take(panel_rows * part[0].numel(), part.dtype).view(-1, *part.shape[1:]) for part in parts]
        for whole, part in zip(written, parts, strict=True):
            whole[first // _WIDE :][: len(part)] = part
    made.weights, made.scales = [whole.data_ptr() for whole in written] + [None] * (2 - len(written))
    return made


def block_rows(columns: int) -> int:
    """Return how many rows are packed at once: whole panels, whose intermediate results stay in the cache."""
    return max(_WIDE, _BLOCK // columns // _WIDE * _WIDE)


def packed(weight: Tensor, group: int, precision: Precision) -> list[Tensor]:
    """Return the panels of a matrix, in words of 4 bytes, and those of its scales if it is quantised."""
    weight = weight.reshape(-1).view(weight.shape)  # with the strides of contiguous rows, even if it has one row
    if precision == "bfloat16":
        pairs = nn.functional.pad(weight.to(torch.bfloat16), (0, weight.shape[1] % 2))
        return [panels(pairs.view(torch.int32))]
    whole, scales = quantise(weight, group, precision)
    # an exclusive or of the bits adds 128
    stored = halves(whole) if precision == "int4" else whole.view(torch.uint8).bitwise_xor(128)
    return [panels(stored.view(torch.int32)), panels(scales)]


def linear(store: Store, module: nn.Linear, precision: Precision) -> Matrix:
    return matrix(store, module.weight, module.bias, precision)


def norm(store: Store, module: nn.Module | None) -> Norm:
    """Return a norm for the kernels; without weights if there is none."""
    if not isinstance(module, LayerNorm | RMSNorm):
        return Norm()
    plain = module.weight is not None and not module.offset
    weight, shift = store.refer(module.weight if plain else module.factor()), store.refer(module.bias)
    return Norm(weight=weight, bias=shift, eps=module.eps, centred=isinstance(module, LayerNorm))


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
