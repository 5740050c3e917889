"""The contents of a GGUF file: its metadata, and its tensors, which are dequantised when they are read."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.errors import install
from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import AGAIN, MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that torch has itself. All others are dequantised to float32."""
ROWS = 4096
"""Rows that are dequantised at a time."""


def library() -> Any:
    """Return the module `gguf`."""
    try:
        import gguf
    except ImportError:
        raise WeightsError(f"GGUF files need the package gguf: {install('export')}.") from None
    return gguf


def is_gguf(path: Path) -> bool:
    """Return True if a file begins like a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file."""

    mapped: MappedFile
    name: str
    type: str
    """The name of the quantisation: F32, Q8_0, ..."""
    shape: tuple[int, ...]
    start: int
    n_bytes: int

    @property
    def file(self) -> Path:
        return self.mapped.path

    @property
    def dtype(self) -> torch.dtype:
        return PLAIN.get(self.type, torch.float32)

    @property
    def is_view(self) -> bool:
        return self.type in PLAIN

    def read(self) -> Tensor:
        if self.type in PLAIN:
            return self.mapped.view(self.start, self.shape, PLAIN[self.type])
        gguf = library()
        kind = gguf.GGMLQuantizationType[self.type]
        count = math.prod(self.shape[:-1])
        rows = self.mapped.view(self.start, (count, self.n_bytes // count), torch.uint8).numpy()
        out = torch.empty(count, self.shape[-1])
        try:
            for start in range(0, count, ROWS):
                out[start : start + ROWS] = torch.from_numpy(gguf.quants.dequantize(rows[start : start + ROWS], kind))
        except NotImplementedError:
            raise WeightsError(
                f"{self.file}: tensor {self.name} has the type {self.type}, which cannot be dequantised: convert the "
                "model with another quantisation, such as Q8_0."
            ) from None
        return out.view(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    mapped: MappedFile


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        WeightsError: the file is truncated, of another version, or has a tensor of an unknown type.
    """
    _check_start(path)
    gguf = library()

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined]
        """The reader of the library, which takes what lies behind the end of a file as empty."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **options: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise WeightsError(f"{path} is a truncated or corrupt GGUF file: {AGAIN}.")
            return super()._get(offset, dtype, count, *rest, **options)

    try:
        reader = Reader(path)
        metadata = {name: _value(field, gguf) for name, field in reader.fields.items()}
    except WeightsError:
        raise
    except Exception as error:  # the library raises many types: KeyError, IndexError, ValueError, OverflowError
        raise _wrong(path, error) from None
    mapped = MappedFile(path)
    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        shape = tuple(int(n) for n in reversed(tensor.shape))
        tensors[tensor.name] = GgufTensor(mapped, tensor.name, kind, shape, tensor.data_offset, tensor.n_bytes)
    return GgufFile(path, metadata, tensors, mapped)


def _value(field: Any, gguf: Any) -> Any:
    """Return a value of the metadata. A float32 becomes the shortest number that it stands for: 1e-05."""
    if field.types == [gguf.GGUFValueType.FLOAT32]:
        return float(str(field.parts[-1][0]))
    return field.contents()


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] != MAGIC:
        raise WeightsError(f"{path} is not a GGUF file: it does not begin with GGUF.")
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in VERSIONS:
        what = "big-endian, or of another version" if version & 0xFFFF == 0 else f"of version {version}"
        raise WeightsError(
            f"{path} is a GGUF file {what}, and only versions {' and '.join(map(str, VERSIONS))} (little-endian) are "
            "read: convert the model again with a current llama.cpp."
        )


def _wrong(path: Path, error: Exception) -> WeightsError:
    text = str(error)
    if "GGMLQuantizationType" in text:
        return WeightsError(
            f"{path} has a tensor of a quantisation that is not known ({text}): convert the model with another one, "
            "such as Q8_0."
        )
    return WeightsError(f"{path} is a truncated or corrupt GGUF file ({type(error).__name__}: {text}): {AGAIN}.")
