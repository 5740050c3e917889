"""Which implementation decodes: torch, or compiled kernels. `choose_engine` decides, from the call and the machine.

`glass sample` and `gf.generate` use its answer, `glass env` prints it. This module and `encoding.py`, for `gf.encode`,
are the only ones of generation that import `glassformer.kernels`, and both work without it.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from glassformer.config import ModelConfig
from glassformer.errors import GlassformerError
from glassformer.generation.request import Engine, GenerationRequest, Precision
from glassformer.generation.state import CapturedState, DecodeState, KernelState, TorchState
from glassformer.model import DecoderLM, Model, Seq2Seq
from glassformer.model.cache import CacheKind

if TYPE_CHECKING:
    from glassformer.kernels.decode import DecodeKernel

WORTH_COMPILING = 32
"""New tokens from which `auto` uses the kernels. Compiling takes about 5 s, once for each machine and version."""
LONG_PROMPT = 256
"""Tokens of a prompt from which `auto` uses kernels that read prompts, however few tokens are new."""
TORCH_PRECISIONS = ("float32", "bfloat16", "float16")
QUANTISED = ("int8", "int4", "fp8")
"""Precisions that only the kernels have."""


class EngineError(GlassformerError):
    """An engine or a precision that cannot be used here."""


@dataclass(frozen=True)
class Call:
    """What the choice depends on, apart from the machine."""

    config: ModelConfig
    dtype: torch.dtype
    """The dtype in which the weights are stored."""
    device: torch.device
    cache: CacheKind | None = "static"
    max_new_tokens: int = 64
    prompt_tokens: int = 0
    """Tokens of the longest prompt."""
    sequences: int = 1
    beams: int = 1
    has_draft: bool = False
    precision: str = "float32"
    """The number format of the weights while decoding."""

    @classmethod
    def of(cls, model: Model, request: GenerationRequest) -> "Call":
        return cls(
            config=model.config,
            dtype=model.dtype,
            device=model.device,
            cache=request.cache,
            max_new_tokens=request.max_new_tokens,
            prompt_tokens=max(map(len, request.prompts), default=0),
            sequences=len(request.prompts),
            beams=request.beams,
            has_draft=request.draft is not None,
        )


@dataclass(frozen=True)
class Implementation:
    """What computes the tokens of a call, and why."""

    engine: Literal["torch", "native"]
    device: str
    precision: str
    """Number format of the weights while decoding."""
    why: str
    kernel: "DecodeKernel | None" = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return {"engine": self.engine, "device": self.device, "precision": self.precision, "why": self.why}

    def text(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision} ({self.why})"


def choose_engine(call: Call, engine: Engine = "auto", precision: Precision = "auto") -> Implementation:
    """Return the implementation for a call. No decode kernel is compiled here.

    `auto` uses the kernels if they support the call on this machine (which includes a compiler) and it asks for at
    least 32 new tokens or, on a GPU, has a prompt of at least 256; otherwise it uses torch and reports why. An engine
    that was requested by name is used, or one sentence says why it cannot be. The environment variable
    GLASSFORMER_NATIVE=0 makes `auto` choose torch.

    A `precision` of `auto` is exact. A CPU computes in float32, whatever the weights are stored in (float64 stays); a
    GPU computes in the stored dtype.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine={engine!r} is not known: use 'auto', 'torch' or 'native'.")
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r} is not known: use {', '.join(map(repr, get_args(Precision)))}.")
    if engine == "torch":
        return _torch(call, precision, "requested")
    call = replace(call, precision=_kernel_precision(call) if precision == "auto" else precision)
    kernel, reason = _choose_decoder()(call)
    only_kernels = call.precision in QUANTISED
    if engine == "auto" and kernel is not None and not only_kernels and (not_worth := _not_worth_it(call, kernel)):
        kernel, reason = None, not_worth
    if kernel is not None:
        why = "requested" if engine == "native" else "the compiled kernels support this model"
        return Implementation("native", call.device.type, call.precision, why, kernel)
    if engine == "native":
        raise EngineError(f"{reason}: use engine='torch' and a precision of float32, or 'auto'.")
    if only_kernels:
        raise EngineError(f"{reason}, and precision={precision!r} needs the compiled kernels: use float32.")
    return _torch(call, precision, reason)


def _choose_decoder() -> "Callable[[Call], tuple[DecodeKernel | None, str]]":
    """Return the function that chooses a decode kernel. Without the package `kernels` it chooses none."""
    try:
        from glassformer.kernels.decode import choose_decoder
    except ImportError:
        return lambda call: (None, "the compiled kernels are not installed")
    return choose_decoder


def make_state(model: Model, request: GenerationRequest, capacity_step: int = 1) -> tuple[DecodeState, Implementation]:
    """Return the decode state of a request and what computes it. If `auto` cannot compile the kernels, torch does.

    The capacity of captured steps is rounded up to a multiple of `capacity_step`, so that they can be used again.
    """
    call = Call.of(model, request)
    chosen = choose_engine(call, request.engine, request.precision)
    if chosen.kernel is not None:
        try:
            least = chosen.kernel.capacity_step
            kernel = replace(chosen.kernel, capacity_step=-(-capacity_step // least) * least)
            return _kernel_state(model, request, chosen, kernel), chosen
        except GlassformerError as error:
            chosen = fall_back(call, request, error)
    assert isinstance(model, DecoderLM | Seq2Seq)  # read_prompts refused any other model
    used = in_precision(model, getattr(torch, chosen.precision))
    state = TorchState(used, request.prompts, request.max_new_tokens, request.cache, request.prefill_chunk)
    return state, chosen


def _kernel_state(
    model: Model, request: GenerationRequest, chosen: Implementation, kernel: "DecodeKernel"
) -> DecodeState:
    if kernel.continues is not None:
        assert isinstance(model, DecoderLM | Seq2Seq)
        return CapturedState(
            in_precision(model, captured_dtype(model, chosen.precision)), request.prompts, request.max_new_tokens,
            request.prefill_chunk, kernel, chosen.precision,
            captures=request.max_new_tokens >= WORTH_COMPILING or request.engine == "native"
            or chosen.precision in QUANTISED,
        )  # fmt: skip
    assert isinstance(model, DecoderLM | Seq2Seq)  # no other kind of model has such a kernel
    assert kernel.make is not None
    capacity = 1 + request.max_new_tokens if isinstance(model, Seq2Seq) else request.capacity
    decoder = kernel.make(model, len(request.prompts), capacity, chosen.precision)
    return KernelState(model, decoder, request.prompts, request.prefill_chunk)


def captured_dtype(model: Model, precision: str) -> torch.dtype:
    """Return the dtype of everything but weights in 8 bits: bfloat16 if the model is stored in more than 16 bits."""
    stored = model.dtype
    if precision in ("int8", "fp8"):
        return stored if stored.itemsize == 2 else torch.bfloat16
    dtype: torch.dtype = getattr(torch, precision)
    return dtype


def fall_back(call: Call, request: GenerationRequest, error: GlassformerError) -> Implementation:
    """Return torch if `auto` chose kernels that could not be compiled; raise the error if torch cannot serve."""
    if request.engine == "native" or request.precision not in ("auto", *TORCH_PRECISIONS):
        raise error
    return _torch(call, request.precision, f"the kernels could not be compiled: {str(error).rstrip('.')}")


def _torch(call: Call, precision: Precision, why: str) -> Implementation:
    if precision not in ("auto", *TORCH_PRECISIONS):
        raise ValueError(f"precision={precision!r} needs the compiled kernels: use engine='native' or 'auto'.")
    if precision != "auto":
        return Implementation("torch", call.device.type, precision, why)
    # half precisions are for storage and for accelerators: a CPU is slower in them
    widened = call.device.type == "cpu" and call.dtype.itemsize == 2
    return Implementation("torch", call.device.type, "float32" if widened else dtype_name(call.dtype), why)


def _kernel_precision(call: Call) -> str:
    """The exact precision of the kernels: a GPU reads weights as they are stored, a CPU computes in float32."""
    return dtype_name(call.dtype) if call.device.type == "cuda" else "float32"


def _not_worth_it(call: Call, kernel: "DecodeKernel") -> str | None:
    if kernels_are_disabled():
        return "GLASSFORMER_NATIVE=0 is set"
    if kernel.reads is not None and call.prompt_tokens >= LONG_PROMPT:
        return None
    if call.max_new_tokens < WORTH_COMPILING:
        return f"fewer than {WORTH_COMPILING} new tokens do not pay for compiling the kernels"
    return None


def kernels_are_disabled() -> bool:
    """Return whether the environment says that `auto` means torch where torch has the precision."""
    return os.environ.get("GLASSFORMER_NATIVE") == "0"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


M = TypeVar("M", bound=Model)


def in_precision(model: M, dtype: torch.dtype) -> M:
    """Return the model that torch computes with: the model itself, or a copy of it in another dtype."""
    if model.dtype is dtype:
        return model
    copied = copy.deepcopy(model)
    copied.to(dtype)
    return copied
