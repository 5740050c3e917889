"""Tensors of files: names and shapes from the file headers, values read one by one on request.

Safetensors files are mapped into memory. The pages of a tensor that was read are given back to the system before the
next one is read, so that reading a model tensor by tensor never holds the file in memory. Pickles are never opened
here, because that can run code; the error explains how to convert them.
"""

import json
import mmap
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glassformer.weights.errors import PickledError, WeightsError, pickled, summarize

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of pickles."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights by their name in a safetensors file."""
PACKED = {
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool},
}
"""Dtypes that are read only as parts of quantised weights."""
AGAIN = "copy or download the file again"


CHUNK = 1 << 23
"""Bytes of a mapped tensor that are copied before its pages are released: 8 MiB."""


class Stored(Protocol):
    """One tensor of a file. Its shape and dtype are known without reading its values."""

    @property
    def is_view(self) -> bool:
        """True if `read` returns a view of the file, False if it returns a new tensor."""

    @property
    def file(self) -> Path: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `read` returns; raises WeightsError if the values are not weights."""

    def read(self) -> Tensor:
        """Return the values: a view of the mapped file, or a new tensor if they have to be computed."""


class MappedFile:
    """A file in the address space of the process. Its pages are read from disk when a view is used.

    A view uses no memory of its own, but reading it after the file was truncated raises SIGBUS: copy what is kept. The
    file stays open, so a file that is replaced in the meantime does not change what is read.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            # a private copy on write: torch has no read-only tensors, and nothing is ever written
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        _MAPPED.add(self._map)

    def bytes(self, start: int, count: int) -> bytes:
        return self._map[start : start + count]

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that starts at byte `start`."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def release(self) -> None:
        """Give the pages that were read back to the system. Views stay valid: they read the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)


_MAPPED: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()
"""Every mapping that is still in use: a view outlives its `MappedFile`, but not the mapping."""


def release_all() -> None:
    """Give the pages of all mapped files back to the system. Views stay valid: they read the file again."""
    if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        for mapped in list(_MAPPED):
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a safetensors file."""

    mapped: MappedFile
    name: str
    code: str
    """The dtype, as the header names it."""
    shape: tuple[int, ...]
    start: int
    is_view = True

    @property
    def file(self) -> Path:
        return self.mapped.path

    @property
    def dtype(self) -> torch.dtype:
        if self.code not in DTYPES:
            raise WeightsError(
                f"{self.file.name}: tensor {self.name} has dtype {self.code}, but only {', '.join(DTYPES)} are "
                "supported: dequantise quantised files first."
            )
        return DTYPES[self.code]

    def read(self) -> Tensor:
        return self.mapped.view(self.start, self.shape, PACKED.get(self.code) or self.dtype)


class Tensors:
    """Tensors of files by name, read one by one. `rename` converts old tensor names to current ones."""

    def __init__(self, stored: Mapping[str, Stored], files: tuple[MappedFile, ...] = ()):
        """Create from the tensors, and from the mapped files whose pages are released between them."""
        self.stored = dict(stored)
        self.files = files

    @classmethod
    def of(cls, path: Path) -> "Tensors":
        """Return the tensors of one safetensors file."""
        mapped = open_safetensors(path)
        return cls(entries(mapped), (mapped,))

    def replace(self, stored: Mapping[str, Stored]) -> "Tensors":
        """Return other tensors of the same files."""
        return Tensors(stored, self.files)

    def rename(self, update_name: Callable[[str], str]) -> "Tensors":
        """Return the same tensors under the names that `update_name` returns."""
        renamed: dict[str, Stored] = {}
        for name, tensor in self.stored.items():
            new = update_name(name)
            if new in renamed:
                raise WeightsError(f"{tensor.file.name} contains {new} under two names: keep one of them.")
            renamed[new] = tensor
        return self.replace(renamed)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __len__(self) -> int:
        return len(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.stored[name].dtype

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor, after releasing the pages of those read before it."""
        self.release()
        return self.stored[name].read()

    def release(self) -> None:
        """Give the pages of all files back to the system."""
        for file in self.files:
            file.release()

    def copy(self, name: str, part: Tensor, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """Return a tensor of its own with the values of `part`, which was read from the tensor `name`.

        Pages of the file are released while it is copied, so that a large tensor is never in memory twice. A part that
        was computed, and that nothing else uses, is returned as it is.
        """
        alone = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
        if alone and not self.stored[name].is_view and part.dtype == dtype and part.device == torch.device(device):
            return part
        out = torch.empty(part.shape, dtype=dtype, device=device)
        if part.dim() == 0 or part.nbytes <= CHUNK:
            return out.copy_(part)
        rows = max(1, CHUNK * part.shape[0] // part.nbytes)
        for start in range(0, part.shape[0], rows):
            out[start : start + rows].copy_(part[start : start + rows])
            self.release()
        return out

    def equal(self, a: str, b: str) -> bool:
        return self.shape(a) == self.shape(b) and torch.equal(self.read(a), self.stored[b].read())


def open_safetensors(path: Path) -> MappedFile:
    """Map a safetensors file after checking its header. The error for any other file says what it seems to be."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
        with safe_open(path, framework="pt", device="cpu"):  # the library checks the header against the file's size
            return MappedFile(path)
    except SafetensorError as error:
        raise _not_safetensors(path, start, str(error)) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None


def entries(mapped: MappedFile) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a safetensors file by name.

    The file starts with the length of its header (8 bytes, little-endian) and the header, a JSON object.
    """
    (length,) = struct.unpack("<Q", mapped.bytes(0, 8))
    header = json.loads(mapped.bytes(8, length))
    return {
        name: SafetensorsEntry(mapped, name, tensor["dtype"], tuple(tensor["shape"]), 8 + length + start)
        for name, tensor in header.items()
        if name != "__metadata__"
        for start in tensor["data_offsets"][:1]
    }


def _not_safetensors(path: Path, start: bytes, reason: str) -> WeightsError:
    """Return the error for a file that is not safetensors.

    A safetensors file starts with the length of its header in 8 bytes. In one file of 32 the first byte is 0x80, as in
    a pickle, so the brace that follows the length decides.
    """
    if (start[:2] == b"PK" or start[:1] == b"\x80") and start[8:9] != b"{":
        return pickled(f"{path} is a pickle (a torch.save file) under another name")
    if start.startswith(b"version https://git-lfs"):
        return WeightsError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")
    reason = reason.removeprefix("Error while deserializing header: ")
    return WeightsError(f"{path} is a truncated or corrupt safetensors file ({reason}): {AGAIN}.")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must contain an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}): {AGAIN}.") from None
    if not isinstance(data, dict):
        raise WeightsError(f"{path} contains a JSON {type(data).__name__}, but must contain an object: {AGAIN}.")
    return data


def open_folder(folder: Path) -> Tensors | None:
    """Return the tensors of a folder: `model.safetensors`, or the shards that its index lists; None if it has none."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return Tensors.of(single)
    if index.exists():
        return _open_shards(folder, index)
    return None


def _open_shards(folder: Path, index: Path) -> Tensors:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise WeightsError(f"{index} has no weight_map from tensor names to files: {AGAIN}.")
    shards = sorted(set(weight_map.values()))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names files outside its folder ({summarize(outside)}): put the shards next to it.")
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise WeightsError(f"{index} lists shards that are not in the folder ({summarize(absent)}): {AGAIN}.")
    files = {shard: open_safetensors(folder / shard) for shard in shards}
    held = {shard: entries(file) for shard, file in files.items()}
    lost = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in held[shard]]
    if lost:
        raise WeightsError(f"{index} lists tensors that are not in their shards ({summarize(lost)}): {AGAIN}.")
    loose = [f"{n} in {s}" for s, names in held.items() for n in sorted(names) if weight_map.get(n) != s]
    if loose:
        raise WeightsError(f"{index} does not list tensors that its shards contain ({summarize(loose)}): {AGAIN}.")
    return Tensors({name: held[shard][name] for name, shard in weight_map.items()}, tuple(files.values()))


def loads_in_transformers(folder: Path) -> bool:
    """Return True if transformers can read the pickled weights of a folder, by their name and with a config.json."""
    return (folder / "config.json").is_file() and any(folder.glob("pytorch_model*.bin"))


def no_weights(folder: Path) -> WeightsError:
    """Return the error for a folder without safetensors; it names the weights that are there instead."""
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES and p.is_file())
    if pickles == ["ckpt.pt"]:
        return PickledError(
            f"{folder} holds only {pickles[0]}, but a folder is read from config.json and model.safetensors: if "
            f"nanoGPT wrote it, give the file itself, {folder / pickles[0]}."
        )
    if pickles:
        return pickled(f"{folder} holds only pickled weights ({summarize(pickles)})", loads_in_transformers(folder))
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        return WeightsError(
            f"{folder} has no {SINGLE} or {INDEX} (found {summarize(others)}): rename the weights to it."
        )
    if graphs := sorted(p.name for p in folder.glob("*.onnx")):
        return WeightsError(
            f"{folder} holds an ONNX model ({summarize(graphs)}), which only onnxruntime reads: give the folder that "
            "it was made of."
        )
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{SINGLE}"))
    if inside:  # a run: best, last
        return WeightsError(f"{folder} has no weights of its own: give a folder inside it, such as {inside[0]}.")
    return WeightsError(f"{folder} has no weights: add {SINGLE}, or shards with {INDEX}.")
