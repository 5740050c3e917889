"""Which implementation decodes: torch, or compiled kernels. `choose_engine` decides, from the call and the machine.

`glass sample` and `gf.generate` use its answer, `glass env` prints it.
"""

import copy
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from glassformer.config import ModelConfig
from glassformer.config.choices import CacheKind, Engine, Precision
from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.decoder import unsupported
from glassformer.kernels.cpu.decode.pack import KINDS
from glassformer.model import Model

WORTH_COMPILING = 32
"""New tokens from which `auto` uses the kernels. Compiling takes about 5 s, once for each machine and version."""
CUDA_PRECISIONS = ("float32", "bfloat16")
TORCH_PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Call:
    """What the choice depends on, apart from the machine."""

    config: ModelConfig
    dtype: torch.dtype
    """Of the weights as they are stored."""
    device: str
    """"cpu" or "cuda"."""
    cache: CacheKind | None
    max_new_tokens: int
    beams: int = 1
    has_draft: bool = False

    @classmethod
    def of(cls, model: Model, cache: CacheKind | None, new: int, beams: int = 1, has_draft: bool = False) -> "Call":
        dtype = next(model.parameters()).dtype
        return cls(model.config, dtype, model.device.type, cache, new, beams, has_draft)


@dataclass(frozen=True)
class Implementation:
    """What computes the tokens of a call, and why."""

    engine: Literal["torch", "native"]
    device: str
    precision: str
    """Number format of the weights while decoding."""
    why: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision} ({self.why})"


def choose_engine(call: Call, engine: Engine = "auto", precision: Precision = "auto") -> Implementation:
    """Return the implementation for a call. Nothing is compiled here.

    `auto` uses the kernels if they support the model, a compiler is there, and the call asks for at least 32 new
    tokens; otherwise it uses torch and says why. An engine that was requested by name is used, or a sentence says why
    it cannot be. The environment variable GLASSFORMER_NATIVE=0 makes `auto` choose torch.

    A `precision` of `auto` is exact. A CPU computes in float32, whatever the weights are stored in (float64 stays); a
    GPU computes in the stored dtype, and its kernels read float16 weights as float32.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine={engine!r} is not known: use 'auto', 'torch' or 'native'.")
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r} is not known: use {', '.join(map(repr, get_args(Precision)))}.")
    if engine == "torch":
        return _torch(call, precision, "requested")
    by_kernels = _kernel_precision(call) if precision == "auto" else precision
    native = Implementation("native", call.device, by_kernels, "requested")
    reason = unsupported_by_kernels(call, by_kernels)
    if engine == "native":
        if reason is not None:
            raise library.NativeError(f"{reason}: use engine='torch' and a precision of float32, or 'auto'.")
        return native
    only_kernels = by_kernels not in TORCH_PRECISIONS
    if reason is None and not only_kernels:
        reason = _not_worth_it(call)
    reason = reason or _no_compiler(call)
    if reason is None:
        return replace(native, why=f"the compiled kernels support this model and {by_kernels}")
    if only_kernels:
        raise library.NativeError(f"{reason}, and precision={precision!r} needs the compiled kernels: use float32.")
    return _torch(call, precision, reason)


def fall_back(call: Call, engine: Engine, precision: Precision, error: ValueError) -> Implementation:
    """Return torch where `auto` chose kernels that could not be compiled; raise the error if torch will not do."""
    if engine == "native" or precision not in ("auto", *TORCH_PRECISIONS):
        raise error
    return _torch(call, precision, f"the kernels could not be compiled: {str(error).rstrip('.')}")


def _torch(call: Call, precision: Precision, why: str) -> Implementation:
    if precision not in ("auto", *TORCH_PRECISIONS):
        raise ValueError(f"precision={precision!r} needs the compiled kernels: use engine='native' or 'auto'.")
    if precision != "auto":
        return Implementation("torch", call.device, precision, why)
    # half precisions are for storage and for accelerators: a CPU is slower in them
    widened = call.device == "cpu" and call.dtype.itemsize == 2
    return Implementation("torch", call.device, "float32" if widened else dtype_name(call.dtype), why)


def unsupported_by_kernels(call: Call, precision: str) -> str | None:
    """Return why the kernels cannot do this call; None if they can."""
    if call.cache not in ("static", "growing"):
        return f"the kernels keep a cache of their own kind, not {call.cache or 'none'!r}"
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels compute in float32 and the model's weights are {call.dtype}"
    if call.device == "cpu":
        if precision not in KINDS:
            return f"the kernels of a CPU have no {precision}"
        return unsupported(call.config)
    if call.device != "cuda":
        return f"there are kernels for a CPU and for CUDA, and the model is on {call.device}"
    if call.has_draft:
        return "the kernels of a GPU do not support a draft"
    if call.beams > 1:
        return f"the kernels of a GPU do not support beam search (beams={call.beams})"
    if precision not in CUDA_PRECISIONS:
        return f"precision={precision!r} is for CPUs: the kernels of a GPU have float32 and bfloat16"
    from glassformer.kernels.cuda.decode.pack import obstacle

    return obstacle(call.config)


def _kernel_precision(call: Call) -> str:
    """The exact precision of the kernels: a GPU reads bfloat16 as it is, everything else becomes float32."""
    return "bfloat16" if call.device == "cuda" and call.dtype is torch.bfloat16 else "float32"


def _not_worth_it(call: Call) -> str | None:
    if os.environ.get("GLASSFORMER_NATIVE") == "0":
        return "GLASSFORMER_NATIVE=0 is set"
    if call.max_new_tokens < WORTH_COMPILING:
        return f"fewer than {WORTH_COMPILING} new tokens do not pay for compiling the kernels"
    return None


def _no_compiler(call: Call) -> str | None:
    if call.device == "cuda":
        from glassformer.kernels.toolchain import nvrtc

        return None if nvrtc.is_available() else "CUDA's run-time compiler (libnvrtc) was not found"
    return library.unavailable()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


M = TypeVar("M", bound=nn.Module)


def in_precision(model: M, implementation: Implementation) -> M:
    """Return the model that torch computes with: the model itself, or a copy of it in another dtype."""
    dtype = getattr(torch, implementation.precision, None)
    if implementation.engine == "native" or next(model.parameters()).dtype is dtype:
        return model
    return copy.deepcopy(model).to(dtype)
