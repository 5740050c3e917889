"""Response bodies: JSON, and tensors in the safetensors format.

A tensor response is an ordinary safetensors file. Its `__metadata__` has two entries, both JSON strings: `meta`, the
other values of the response, and `ranges`, the lowest and highest value of each tensor. A tensor of dtype U8 is
quantised: value = low + (high - low) * x / 255. The ranges of the other tensors are those of their finite values.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MEDIA_TYPE = "application/octet-stream"
"""Media type of a safetensors body; the format has no registered one."""
FLOAT16_MAX = 65504.0
Dtype = Literal["uint8", "float16", "float32", "int32"]


@dataclass(frozen=True)
class TensorResponse:
    """Named tensors (torch or NumPy), each with the dtype it is sent in, and JSON values that go with them."""

    tensors: Mapping[str, tuple[Any, Dtype]]
    meta: dict[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest value of a uint8 tensor. Default: the range of its own values."""

    def encode(self) -> bytes:
        """Return the bytes of a safetensors file."""
        from safetensors.numpy import save

        arrays, ranges = {}, {}
        for name, (tensor, dtype) in self.tensors.items():
            array = _to_numpy(tensor, exact=dtype != "uint8")
            low, high = ranges[name] = self.ranges.get(name) or _finite_range(array)
            if dtype == "float16" and max(abs(low), abs(high)) > FLOAT16_MAX:
                dtype = "float32"
            array = _quantise(array, low, high) if dtype == "uint8" else array.astype(dtype, copy=False)
            arrays[name] = array if array.flags.c_contiguous else array.copy()
        return bytes(save(arrays, {"meta": to_json(self.meta).decode(), "ranges": to_json(ranges).decode()}))


def _to_numpy(tensor: Any, exact: bool) -> Any:
    """Convert to NumPy; float64 if `exact`, so that integers survive. Patterns are large and stay in float32."""
    import numpy as np

    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    on_cpu = tensor.detach().cpu()
    return (on_cpu.double() if exact else on_cpu.float()).numpy()


def _finite_range(array: Any) -> tuple[float, float]:
    """Return the lowest and highest finite value; (0, 0) if there is none."""
    import numpy as np

    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _quantise(array: Any, low: float, high: float) -> Any:
    """Map low..high to 0..255, one slice of the first axis at a time, so that temporary copies stay small."""
    import numpy as np

    out = np.empty(array.shape, np.uint8)
    scale = 255 / ((high - low) or 1.0)
    for source, target in zip(np.atleast_2d(array), np.atleast_2d(out), strict=True):
        part = np.nan_to_num(source - low, copy=False) * scale
        target[...] = np.clip(np.rint(part, out=part), 0, 255, out=part)
    return out


def to_json(value: Any) -> bytes:
    """Encode plain values as ASCII JSON. NaN and infinities become null; lone surrogates stay escaped."""
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
