"""Tensors of a folder, named and shaped without reading them; read one by one when they are asked for.

Only safetensors is read. A pickle runs code when it is opened, so none ever is: a folder that holds one instead is
refused with the way to convert it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glassformer.weights.errors import WeightsError, pickled, some

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of pickles."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AGAIN = "copy or download the file again"


class Tensors:
    """Foreign tensors by name. `shape` and `dtype` read headers only; `read` returns a view of the mapped file.

    A view costs no memory of its own, but it dies (SIGBUS) with a file that somebody truncates: what is kept has to be
    copied. Names may be respelled on the way in (`rename`), for files older than today's spelling.
    """

    def __init__(self, files: dict[str, Path], handles: dict[Path, Any]):
        """`files` maps each tensor to the file that holds it; `handles` are those files, opened once and for all: a
        folder that is replaced meanwhile does not change what is read."""
        self._where = {name: (path, name) for name, path in files.items()}
        self._handles = handles

    @classmethod
    def of(cls, path: Path) -> "Tensors":
        """Those of one file."""
        handle = open_safetensors(path)
        return cls(dict.fromkeys(handle.keys(), path), {path: handle})

    def rename(self, respell: Callable[[str], str]) -> "Tensors":
        out = Tensors({}, self._handles)
        for name, place in self._where.items():
            new = respell(name)
            if new in out._where:
                raise WeightsError(f"{place[0].name} holds {new} under two names: keep one of them.")
            out._where[new] = place
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
                f"{path.name}: tensor {stored} has dtype {code}; weights are read as {', '.join(DTYPES)} "
                "(quantised files must be dequantised first)."
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
    """A safetensors file, its header read; anything else is refused with what it seems to be."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise _not_safetensors(path, start, str(error)) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None


def _not_safetensors(path: Path, start: bytes, reason: str) -> WeightsError:
    """What a file is instead. A safetensors file begins with the length of its header, which in one of 32 looks like
    the first byte of a pickle (0x80), so the brace that must follow it decides."""
    if (start[:2] == b"PK" or start[:1] == b"\x80") and start[8:9] != b"{":
        return pickled(f"{path} is a pickle (a torch.save file) under another name")
    if start.startswith(b"version https://git-lfs"):
        return WeightsError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")
    reason = reason.removeprefix("Error while deserializing header: ")
    return WeightsError(f"{path} is truncated or corrupt, not a whole safetensors file ({reason}): {AGAIN}.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}): {AGAIN}.") from None
    if not isinstance(data, dict):
        raise WeightsError(f"{path} holds a JSON {type(data).__name__}, but an object of named values is needed.")
    return data


def open_folder(folder: Path) -> Tensors | None:
    """The tensors of a folder: `model.safetensors`, or the shards that its index lists; None when there are none."""
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
        raise WeightsError(f"{index} names files outside its folder ({some(outside)}): shards must lie beside it.")
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise WeightsError(f"{index} lists shards that are not in the folder ({some(absent)}): {AGAIN}.")
    handles = {folder / shard: open_safetensors(folder / shard) for shard in shards}
    held = {shard: set(handles[folder / shard].keys()) for shard in shards}
    lost = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in held[shard]]
    if lost:
        raise WeightsError(f"{index} places tensors in shards that do not hold them ({some(lost)}): {AGAIN}.")
    loose = [f"{n} in {s}" for s, names in held.items() for n in sorted(names) if weight_map.get(n) != s]
    if loose:
        raise WeightsError(f"{index} does not list tensors that its shards hold ({some(loose)}): {AGAIN}.")
    return Tensors({name: folder / shard for name, shard in weight_map.items()}, handles)


def loads_in_transformers(folder: Path) -> bool:
    """True if transformers reads the pickled weights of a folder: it knows them by name and needs the config."""
    return (folder / "config.json").is_file() and any(folder.glob("pytorch_model*.bin"))


def no_weights(folder: Path) -> WeightsError:
    """The error of a folder without safetensors, naming what lies there instead."""
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES and p.is_file())
    if pickles:
        return pickled(f"{folder} holds only pickled weights ({some(pickles)})", loads_in_transformers(folder))
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        return WeightsError(f"{folder} has no {SINGLE} or {INDEX} (found {some(others)}): rename the weights to it.")
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{SINGLE}"))
    if inside:  # a run: best, last
        return WeightsError(f"{folder} has no weights of its own: name a folder in it, such as {inside[0]}.")
    return WeightsError(f"{folder} has no weights: put {SINGLE}, or its shards with {INDEX}, there.")
