"""The decode kernels: which there are, what each supports, and which one serves a request.

A decode kernel computes the logits of the next token from a KV cache of its own, or it replays the steps after a prompt
that the model itself has read. Only `choose_decoder` decides whether one is used. Its answer depends on the request and
the machine, never on what was compiled before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from glassformer.config import EncoderConfig, ModelConfig
from glassformer.kernels.cpu.decode import NativeDecoder, library, unsupported_config
from glassformer.kernels.cpu.decode.pack import KINDS
from glassformer.kernels.cuda.decode import pack as cuda_pack
from glassformer.kernels.cuda.graph.linear import LARGEST_BATCH
from glassformer.kernels.cuda.graph.parts import unsupported_parts
from glassformer.kernels.cuda.graph.prompt import prompt_reader
from glassformer.kernels.cuda.graph.steps import SLOT_STEP, captured_steps, unsupported_device
from glassformer.kernels.registry import Kernel
from glassformer.kernels.toolchain import nvrtc
from glassformer.model.cache import CacheKind
from glassformer.shapes import Float, Int

SMALL_MODEL = 2**28
"""Bytes of weights up to which kernels for small models are faster than a graph (docs/benchmarks_history.md)."""
FEW_SEQUENCES = 16
"""Sequences of a small model up to which a graph is faster than its own kernels (docs/benchmarks_history.md)."""


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


class Steps(Protocol):
    """The steps of some sequences after their prompts, and how sequences are exchanged."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return the logits after one more token per sequence."""

    def greedy(self, tokens: Int[Tensor, "B"], count: int) -> tuple[Int[Tensor, "N B"], Float[Tensor, "B V"]]:
        """Launch `count` steps after the given tokens, each to the most likely one. The last logits are valid until
        the next step.
        """

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        """Let sequence i continue the present sequence parents[i]."""


class Decoder(Protocol):
    """A kernel with a KV cache of its own, which reads the prompts too.

    Speculative decoding also needs `extend`, and a cache that outlives a generation `crop`, `take` and `capacity`.
    """

    owns_threads: bool
    """True: it computes in CPU threads of its own, so torch should use one thread between the steps."""

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "B V"]:
        """Return the logits after each prompt. `chunk` is the largest number of tokens that are read at once."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]: ...

    def reorder(self, parents: Int[Tensor, "N"]) -> None: ...


@dataclass(frozen=True)
class DecodeKernel(Kernel):
    """A decode kernel, and how its decoder is made."""

    device: Literal["cpu", "cuda"]
    make: Callable[[Any, int, int, str], Decoder] | None = None
    """Return the decoder of a model for (number of sequences, capacity in tokens, precision), compiled if need be."""
    continues: Callable[..., Steps] | None = None
    """Return the steps that continue a KV cache which the model has filled: see `captured_steps`."""
    reads: Callable[[Any, Any], Any] | None = None
    """Return what reads the prompts of a model with these modules into that cache: see `prompt_reader`."""
    capacity_step: int = 1
    """The capacity of that cache is a multiple of this."""


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


def supported_by_graph(request: DecodeRequest) -> str | None:
    """Return why a captured CUDA graph cannot serve a request, or None if it can."""
    if request.has_draft:
        return "a captured step does not support a draft"
    if request.cache not in ("static", "growing"):
        return f"a captured step keeps a static cache, not {request.cache or 'none'!r}"
    if request.precision in ("int8", "fp8"):
        return _unsupported_in_8_bits(request)
    if request.precision == "int4":
        return "precision='int4' is for CPUs: a GPU has int8 and fp8"
    return None


def _unsupported_in_8_bits(request: DecodeRequest) -> str | None:
    if request.sequences * request.beams > LARGEST_BATCH:
        return f"weights in 8 bits are for up to {LARGEST_BATCH} sequences on a GPU, not {request.sequences}"
    return _unsupported_as_fused(request)


def _unsupported_as_fused(request: DecodeRequest) -> str | None:
    """Return why the steps of a graph have no fused kernels for a model, or None if they have."""
    reason = unsupported_parts(request.config, 0).get("model")
    return unsupported_device(request.device) if reason is None and torch.cuda.is_available() else reason


def supported_by_batch(request: DecodeRequest) -> str | None:
    """Return why the CUDA kernels for sequences of a small model cannot serve a request, or None if they can."""
    is_few = request.sequences <= FEW_SEQUENCES and request.precision in ("bfloat16", "float16")
    if is_few and _unsupported_as_fused(request) is None:
        return f"a graph decodes up to {FEW_SEQUENCES} sequences faster than the kernels for small models"
    return _unsupported_as_small(request)


def _unsupported_as_small(request: DecodeRequest) -> str | None:
    """Return why a request is not for a small model that has kernels of its own, or None if it is."""
    if request.has_draft:
        return "the kernels for small models do not support a draft"
    if request.beams > 1:
        return f"the kernels for small models do not support beam search (beams={request.beams})"
    if request.precision not in cuda_pack.DTYPES:
        return f"the kernels for small models have float32 and bfloat16, not {request.precision}"
    if (reason := _unsupported_state(request) or cuda_pack.unsupported_config(request.config)) is not None:
        return reason
    if weight_bytes(request.config, cuda_pack.DTYPES[request.precision]) > SMALL_MODEL:
        return "a graph decodes large models faster than the kernels for small ones"
    return None if nvrtc.is_available() else "CUDA's run-time compiler (libnvrtc) was not found"


def supported_by_persistent(request: DecodeRequest) -> str | None:
    """Return why the persistent CUDA kernel cannot serve a request, or None if it can."""
    if request.sequences != 1:
        return f"the persistent kernel decodes one sequence, not {request.sequences}"
    if (reason := _unsupported_as_small(request)) is not None:
        return reason
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    from glassformer.kernels.cuda.decode.decoder import unsupported_device as unsupported_by_device

    return unsupported_by_device(request.config, cuda_pack.DTYPES[request.precision], request.device)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a step reads of a decoder without experts: its blocks and its head."""
    H, G, K, U = config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    hidden = config.d_ff * (3 if config.feedforward.kind == "gated" else 2)
    per_layer = config.d_model * (H * K + G * K + G * U + H * U + hidden)
    return dtype.itemsize * (config.n_layers * per_layer + config.vocab_size * config.d_model)


def _unsupported_state(request: DecodeRequest) -> str | None:
    if request.cache not in ("static", "growing"):
        return f"the kernels keep a cache of their own kind, not {request.cache or 'none'!r}"
    if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels compute in float32 and the model's weights are {request.dtype}"
    return None


def _small_model_steps(*given: Any, **named: Any) -> Steps:
    from glassformer.kernels.cuda.decode.steps import small_model_steps

    return small_model_steps(*given, **named)


ON_CPU = (
    "logits within 3e-5 of their largest magnitude in float32; lower precisions round the weights, and keys and values "
    "to float16"
)
ON_CUDA = "logits within 5e-6 of their largest magnitude in float32; rounding of the weights in bfloat16"
BY_GRAPH = "the logits of the model's own modules; fused kernels round as bfloat16 or float16 does, and 8 bits more"


def _replaces(reads: str) -> str:
    return f"a forward pass of the model over {reads}, with a cache"


DECODE_KERNELS: tuple[DecodeKernel, ...] = (
    DecodeKernel(
        "cpu-decode", _replaces("the new tokens"), supported_on_cpu, ON_CPU,
        "tests/kernels/cpu/decode/test_decoder.py", "cpu", NativeDecoder,
    ),
    DecodeKernel(
        "cuda-persistent", _replaces("one new token of one sequence"), supported_by_persistent, ON_CUDA,
        "tests/kernels/cuda/decode/test_decoder.py", "cuda",
        continues=partial(_small_model_steps, "persistent"), reads=prompt_reader, capacity_step=SLOT_STEP,
    ),
    DecodeKernel(
        "cuda-batch", _replaces("one new token per sequence"), supported_by_batch, ON_CUDA,
        "tests/kernels/cuda/decode/test_batch.py", "cuda",
        continues=partial(_small_model_steps, "batch"), reads=prompt_reader, capacity_step=SLOT_STEP,
    ),
    DecodeKernel(
        "cuda-graph", _replaces("one new token per sequence"), supported_by_graph, BY_GRAPH,
        "tests/kernels/cuda/graph/test_fused.py", "cuda", continues=captured_steps,
        reads=prompt_reader, capacity_step=SLOT_STEP,
    ),
)  # fmt: skip
"""In order of preference."""
