"""Tensors of several ranks in one safetensors file: every rank writes and reads its own part of each tensor.

No rank holds more than its own part. The file is, byte for byte, the one that a single process writes with safetensors:
the header and all offsets follow from names, shapes and dtypes, which every rank knows.

Ranks of one host write into the same file. Several hosts do not: two of them writing within one page of a file on a
network file system can lose bytes. There, tensors are gathered one at a time, and rank 0 writes them.
"""

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from glassformer.training.distributed.replicate import Replicated

Box = tuple[slice, ...]
"""The part of a tensor that one rank holds: a range of each dimension."""
# dtypes in the order in which the safetensors library sorts them, last first
CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
ALIGNMENT = 8
"""The header is padded with spaces to a multiple of this many bytes."""


def box_of(tensor: Any) -> Box:
    """Return which part of the whole tensor this rank holds."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    local: Tensor
    is_written: bool
    """Of several ranks that hold the same part, the first writes it."""
    source: Any
    """The tensor itself."""


def piece_of(tensor: Any, rank: int, copy: bool = False) -> Piece:
    """Return the part of a tensor that this rank holds; with `copy`, its present values on the CPU."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        place = tensor.device_mesh.get_coordinate()
        assert place is not None
        first = all(at == 0 for at, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate())
        local = tensor.to_local()
    else:
        first, local = rank == 0, tensor
    local = local.detach().to("cpu", copy=True) if copy and first else local.detach()
    return Piece(tuple(tensor.shape), box_of(tensor), local, first, tensor)


def plan(pieces: dict[str, Piece]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of the file, the offset of each tensor in it, and the size of the file."""
    order = list(CODES)
    names = sorted(pieces, key=lambda name: (order.index(pieces[name].local.dtype), name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = list(pieces[name].shape), pieces[name].local.dtype
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + entries[name]["data_offsets"][0] for name in names}
    return header, offsets, len(header) + end


def runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (index of the first element, number of elements) of each contiguous stretch of a part of a tensor."""
    sizes = [part.stop - part.start for part in box]
    if 0 in sizes:
        return
    cut = max((d for d, n in enumerate(sizes) if n != shape[d]), default=0)  # whole beyond this dimension
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = math.prod(sizes[cut:])
    for index in itertools.product(*(range(part.start, part.stop) for part in box[:cut])):
        first = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield first + (box[cut].start * strides[cut] if shape else 0), length


def write(path: Path, tensors: Mapping[str, Any], group: "Replicated") -> None:
    """Write tensors that are sharded over the ranks of a group, or pieces of them. An error on one is raised on all."""
    pieces = {name: t if isinstance(t, Piece) else piece_of(t, group.rank) for name, t in tensors.items()}
    header, offsets, size = plan(pieces)

    def create() -> None:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)

    group.on_main(create)
    problem: tuple[int, str] | None = None
    try:
        with path.open("r+b", buffering=0) as file:
            for name, piece in pieces.items():
                if not group.one_host:
                    piece = piece_of(group.whole_tensor(name, piece.source), group.rank)
                if piece.is_written:
                    _write_piece(file.fileno(), offsets[name], piece)
            os.fsync(file.fileno())
    except OSError as error:
        problem = (error.errno or 5, error.strerror or str(error))
    for found in group.gather(problem):
        if found is not None:
            raise OSError(*found)


def _write_piece(file: int, offset: int, piece: Piece) -> None:
    size = piece.local.element_size()
    data: memoryview = piece.local.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    done = 0
    for first, count in runs(piece.shape, piece.box):
        end = done + count * size
        place = offset + first * size
        while done < end:
            written = os.pwrite(file, data[done:end], place)
            done, place = done + written, place + written
