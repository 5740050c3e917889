"""The decode kernels: which there are, what each supports, and which one serves a request.

A decode kernel computes the logits of the next token from a KV cache of its own. Only `choose_decoder` decides whether
one is used. Its answer depends on the request and the machine, never on what was compiled before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from glassformer.config import EncoderConfig, ModelConfig
from glassformer.kernels.cpu.decode import NativeDecoder, library, unsupported_config
from glassformer.kernels.cpu.decode.pack import KINDS
from glassformer.kernels.cuda.decode import pack as cuda_pack
from glassformer.kernels.registry import Kernel
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.model.cache import CacheKind
from glassformer.shapes import Float, Int

CUDA_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The precisions of the CUDA kernels."""


class DecodeRequest(Protocol):
    """What the choice of a kernel depends on, apart from the machine."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weights are stored."""

    @property
    def device(self) -> torch.device: ...

    @property
    def precision(self) -> str:
        """The number format of the weights while decoding."""

    @property
    def sequences(self) -> int: ...

    @property
    def cache(self) -> CacheKind | None: ...

    @property
    def beams(self) -> int: ...

    @property
    def has_draft(self) -> bool: ...


class Decoder(Protocol):
    """A kernel at work: the KV cache of some sequences, and the steps that extend it.

    `greedy(tokens, count)` is optional: the `count` tokens after the given ones, each the most likely, as lists with
    one token per sequence, and the logits of the last step. `extend` is needed for speculative decoding only.
    """

    owns_threads: bool
    """True: it computes in CPU threads of its own, so torch should use one thread between the steps."""

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "B V"]:
        """Return the logits after each prompt. `chunk` is the largest number of tokens that are read at once."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return the logits after one more token per sequence."""

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        """Let sequence i continue the present sequence parents[i]."""


@dataclass(frozen=True)
class DecodeKernel(Kernel):
    """A decode kernel, and how its decoder is made."""

    device: Literal["cpu", "cuda"]
    make: Callable[[Any, int, int, str], Decoder]
    """Return the decoder of a model for (number of sequences, capacity in tokens, precision), compiled if need be."""


def choose_decoder(request: DecodeRequest) -> tuple[DecodeKernel | None, str]:
    """Return the first kernel that supports a request; otherwise None and the reason. No decode kernel is compiled."""
    reason = f"there are kernels for a CPU and for CUDA, and the model is on {request.device.type}"
    for kernel in DECODE_KERNELS:
        if kernel.device == request.device.type:
            refused = kernel.supports(request)
            if refused is None:
                return kernel, ""
            reason = refused
    return None, reason


def supported_on_cpu(request: DecodeRequest) -> str | None:
    """Return why the CPU kernel cannot serve a request, or None if it can."""
    if isinstance(request.config, EncoderConfig):
        return "an encoder does not generate text"
    if request.precision not in KINDS:
        return f"the kernels of a CPU have no {request.precision}"
    return _unsupported_state(request) or unsupported_config(request.config) or library.unavailable()


def supported_by_batch(request: DecodeRequest) -> str | None:
    """Return why the CUDA kernels for any number of sequences cannot serve a request, or None if they can."""
    if request.has_draft:
        return "the kernels of a GPU do not support a draft"
    if request.beams > 1:
        return f"the kernels of a GPU do not support beam search (beams={request.beams})"
    if request.precision not in CUDA_DTYPES:
        return f"precision={request.precision!r} is for CPUs: the kernels of a GPU have float32 and bfloat16"
    if (reason := _unsupported_state(request) or cuda_pack.unsupported_config(request.config)) is not None:
        return reason
    return None if nvrtc.is_available() else "CUDA's run-time compiler (libnvrtc) was not found"


def supported_by_persistent(request: DecodeRequest) -> str | None:
    """Return why the persistent CUDA kernel cannot serve a request, or None if it can."""
    if request.sequences != 1:
        return f"the persistent kernel decodes one sequence, not {request.sequences}"
    if (reason := supported_by_batch(request)) is not None:
        return reason
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    from glassformer.kernels.cuda.decode.decoder import unsupported_device

    return unsupported_device(request.config, CUDA_DTYPES[request.precision], request.device)


def _unsupported_state(request: DecodeRequest) -> str | None:
    if request.cache not in ("static", "growing"):
        return f"the kernels keep a cache of their own kind, not {request.cache or 'none'!r}"
    if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels compute in float32 and the model's weights are {request.dtype}"
    return None


def _make_persistent(model: DecoderLM, sequences: int, capacity: int, precision: str) -> Decoder:
    from glassformer.kernels.cuda.decode.session import persistent_session

    return persistent_session(model, capacity, CUDA_DTYPES[precision])


def _make_batch(model: DecoderLM, sequences: int, capacity: int, precision: str) -> Decoder:
    from glassformer.kernels.cuda.decode.session import batch_session

    return batch_session(model, sequences, capacity, CUDA_DTYPES[precision])


def _kernel(
    device: Literal["cpu", "cuda"],
    name: str,
    reads: str,
    supports: Callable[[DecodeRequest], str | None],
    make: Callable[[Any, int, int, str], Decoder],
    accuracy: str,
    test: str,
) -> DecodeKernel:
    replaces = f"a forward pass of a model that generates text over {reads}, with a cache"
    return DecodeKernel(
        f"{device}-{name}", "decode", replaces, supports, accuracy, f"tests/kernels/{test}.py", device, make
    )


ON_CPU = "logits within 3e-5 of their largest magnitude in float32; lower precisions round the weights"
ON_CUDA = "logits within 5e-6 of their largest magnitude in float32; rounding of the weights in bfloat16"
DECODE_KERNELS: tuple[DecodeKernel, ...] = (
    _kernel("cpu", "decode", "the new tokens", supported_on_cpu, NativeDecoder, ON_CPU, "cpu/decode/test_decoder"),
    _kernel("cuda", "persistent", "one new token of one sequence", supported_by_persistent, _make_persistent, ON_CUDA,
            "cuda/decode/test_decoder"),
    _kernel("cuda", "batch", "one new token per sequence", supported_by_batch, _make_batch, ON_CUDA,
            "cuda/decode/test_batch"),
)  # fmt: skip
"""In order of preference."""
