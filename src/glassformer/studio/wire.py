"""Tensors on the wire: a small JSON header, then the bytes of each tensor, little-endian, 4-byte aligned.

    b"GLAS"  uint32 length of the header  header  payload
    header = {"tensors": [{"name", "dtype", "shape", "offset", "low", "high"}...], "meta": {...}}

`offset` counts from the start of the payload, which is itself aligned: the header is padded with blanks. dtypes are u8,
f16, f32 and i32. A u8 means value = low + (high - low) * x / 255; of the others, low and high are the finite range.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"GLAS"
MEDIA_TYPE = "application/x-glass"
HALF_MAX = 65504.0
"""The largest float16."""
_NUMPY = {"u8": "<u1", "f16": "<f2", "f32": "<f4", "i32": "<i4"}


@dataclass(frozen=True)
class Packet:
    """Tensors (or arrays) by name, each with its dtype on the wire, and plain facts beside them."""

    tensors: Mapping[str, tuple[Any, str]]
    meta: dict[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """low and high of a u8 tensor; its own range where it is not given."""

    def encode(self) -> bytes:
        payload, rows = bytearray(), []
        for name, (tensor, wanted) in self.tensors.items():
            array = _array(tensor, exact=wanted != "u8")
            low, high = self.ranges.get(name) or _range(array)
            dtype = "f32" if wanted == "f16" and max(abs(low), abs(high)) > HALF_MAX else wanted
            if dtype == "u8":
                array = _in_bytes(array, low, high)
            offset = len(payload)
            payload += array.astype(_NUMPY[dtype], copy=False).tobytes()
            payload += bytes(-len(payload) % 4)
            shape = list(array.shape)
            rows.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset, "low": low, "high": high})
        header = to_json({"tensors": rows, "meta": self.meta})
        header += b" " * (-(len(header) + 8) % 4)
        return MAGIC + struct.pack("<I", len(header)) + header + bytes(payload)


def _array(tensor: Any, exact: bool) -> Any:
    """As numpy; patterns that become bytes stay as they are, for there are millions of them."""
    import numpy as np

    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    held = tensor.detach().cpu()
    return (held.double() if exact else held.float()).numpy()


def _range(array: Any) -> tuple[float, float]:
    """The least and the largest finite number."""
    import numpy as np

    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _in_bytes(array: Any, low: float, high: float) -> Any:
    """0 to 255 over the range, row by row of the first axis: no copy is larger than one of them."""
    import numpy as np

    out = np.empty(array.shape, np.uint8)
    scale = 255 / ((high - low) or 1.0)
    for row, target in zip(np.atleast_2d(array), np.atleast_2d(out), strict=True):
        part = np.nan_to_num(row - low, copy=False) * scale
        target[...] = np.clip(np.rint(part, out=part), 0, 255, out=part)
    return out


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays by name, meta) of a message. u8 comes back as its values. Raises ValueError for anything else."""
    import numpy as np

    if data[:4] != MAGIC or len(data) < 8:
        raise ValueError("this is no glass message: it must begin with GLAS.")
    (length,) = struct.unpack("<I", data[4:8])
    header = json.loads(data[8 : 8 + length])
    payload, arrays = data[8 + length :], {}
    for row in header["tensors"]:
        count = math.prod(row["shape"])
        array = np.frombuffer(payload, _NUMPY[row["dtype"]], count, row["offset"]).reshape(row["shape"])
        if row["dtype"] == "u8":
            array = row["low"] + (row["high"] - row["low"]) * array.astype(np.float64) / 255
        arrays[row["name"]] = array
    return arrays, header["meta"]


def to_json(value: Any) -> bytes:
    """Plain values as JSON in ASCII: NaN and infinities become null, lone surrogates stay escaped."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
