"""Tensors of a folder: names and shapes from the file headers, values read one by one on request.

Only safetensors is read. Pickles are never opened, because that can run code; the error explains how to convert them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glassformer.weights.errors import WeightsError, pickled, summarize

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of pickles."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AGAIN = "copy or download the file again"


class Tensors:
    """Tensors of safetensors files by name. `shape` and `dtype` use headers only; `read` returns a view of the file.

    A view uses no memory of its own, but reading it after the file was truncated raises SIGBUS. Copy what is kept.
    `rename` converts old tensor names to current ones.
    """

    def __init__(self, files: dict[str, Path], handles: dict[Path, Any]):
        """Create from `files`, the file of each tensor, and `handles`, the open files.

        The files stay open, so a folder that is replaced in the meantime does not change what is read.
        """
        self._where = {name: (path, name) for name, path in files.items()}
        self._handles = handles

    @classmethod
    def of(cls, path: Path) -> "Tensors":
        """Return the tensors of one file."""
        handle = open_safetensors(path)
        return cls(dict.fromkeys(handle.keys(), path), {path: handle})

    def rename(self, update_name: Callable[[str], str]) -> "Tensors":
        """Return the same tensors under the names that `update_name` returns."""
        out = Tensors({}, self._handles)
        for name, location in self._where.items():
            new = update_name(name)
            if new in out._where:
                raise WeightsError(f"{location[0].name} contains {new} under two names: keep one of them.")
            out._where[new] = location
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        path, stored = self._where[name]
        return tuple(self._handles[path].get_slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        path, stored = self._where[name]
        code = self._handles[path].get_slice(stored).get_dtype()
        if code not in DTYPES:
            raise WeightsError(
                f"{path.name}: tensor {stored} has dtype {code}, but only {', '.join(DTYPES)} are supported: "
                "dequantise quantised files first."
            )
        return DTYPES[code]

    def read(self, name: str) -> Tensor:
        path, stored = self._where[name]
        try:
            return self._handles[path].get_tensor(stored)
        except SafetensorError as error:
            raise WeightsError(f"{path}: tensor {stored} cannot be read ({error}): {AGAIN}.") from None

    def equal(self, a: str, b: str) -> bool:
        return self.shape(a) == self.shape(b) and torch.equal(self.read(a), self.read(b))


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file and read its header. The error for any other file says what it seems to be."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise _not_safetensors(path, start, str(error)) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None


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
    handles = {folder / shard: open_safetensors(folder / shard) for shard in shards}
    held = {shard: set(handles[folder / shard].keys()) for shard in shards}
    lost = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in held[shard]]
    if lost:
        raise WeightsError(f"{index} lists tensors that are not in their shards ({summarize(lost)}): {AGAIN}.")
    loose = [f"{n} in {s}" for s, names in held.items() for n in sorted(names) if weight_map.get(n) != s]
    if loose:
        raise WeightsError(f"{index} does not list tensors that its shards contain ({summarize(loose)}): {AGAIN}.")
    return Tensors({name: folder / shard for name, shard in weight_map.items()}, handles)


def loads_in_transformers(folder: Path) -> bool:
    """Return True if transformers can read the pickled weights of a folder, by their name and with a config.json."""
    return (folder / "config.json").is_file() and any(folder.glob("pytorch_model*.bin"))


def no_weights(folder: Path) -> WeightsError:
    """Return the error for a folder without safetensors; it names the weights that are there instead."""
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES and p.is_file())
    if pickles:
        return pickled(f"{folder} holds only pickled weights ({summarize(pickles)})", loads_in_transformers(folder))
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        return WeightsError(
            f"{folder} has no {SINGLE} or {INDEX} (found {summarize(others)}): rename the weights to it."
        )
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{SINGLE}"))
    if inside:  # a run: best, last
        return WeightsError(f"{folder} has no weights of its own: give a folder inside it, such as {inside[0]}.")
    return WeightsError(f"{folder} has no weights: add {SINGLE}, or shards with {INDEX}.")
