"""The encode kernels: which there are, what each supports, and which one serves a call of `gf.encode`.

An encode kernel computes the hidden states of texts of unequal length. Only `choose_encoder` decides whether one is
used. Its answer depends on the model and the machine, never on what was compiled or captured before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.kernels.cpu.decode import library, unsupported_config
from glassformer.kernels.cpu.decode.encoder import native_encoder
from glassformer.kernels.cpu.decode.pack import KINDS
from glassformer.kernels.cuda.graph.captured_encoder import graph_encoder, padded_shape
from glassformer.kernels.registry import Kernel
from glassformer.model import EncoderLM
from glassformer.shapes import Float


class EncodeRequest(Protocol):
    """What the choice of a kernel depends on, apart from the machine."""

    @property
    def config(self) -> c.ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weights are stored."""

    @property
    def device(self) -> torch.device: ...

    @property
    def precision(self) -> str:
        """The number format of the weights while encoding."""


class Encoder(Protocol):
    """What computes the hidden states of texts."""

    def encode(
        self, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
    ) -> list[Float[Tensor, "T D"]]:
        """Return the hidden states of each text, after the final norm. `segments` are the segment ids of its tokens."""


@dataclass(frozen=True)
class EncodeKernel(Kernel):
    """An encode kernel, and how its encoder is made."""

    device: Literal["cpu", "cuda"]
    make: Callable[[EncoderLM, list[nn.Module], str], Encoder]
    """Return the encoder of a model for (model, modules of its embedding and encoder, precision)."""
    padded: Callable[[int, int, int | None], tuple[int, int]] | None = None
    """Return rows and length of the padded batch of (texts, their longest, positions of the model).

    None: the kernel pads nothing, so it receives all texts at once.
    """

    @property
    def owns_threads(self) -> bool:
        """True: it computes in CPU threads of its own, so torch should use one thread between its calls."""
        return self.device == "cpu"


def choose_encoder(request: EncodeRequest) -> tuple[EncodeKernel | None, str]:
    """Return the first kernel that supports a request; otherwise None and the reason."""
    reason = f"there are kernels for a CPU and for CUDA, and the model is on {request.device.type}"
    for kernel in ENCODE_KERNELS:
        if kernel.device == request.device.type:
            refused = kernel.supports(request)
            if refused is None:
                return kernel, ""
            reason = refused
    return None, reason


def supported_on_cpu(request: EncodeRequest) -> str | None:
    """Return why the CPU kernel cannot encode with a model, or None if it can."""
    if request.precision not in KINDS:
        return f"the kernels of a CPU have no {request.precision}"
    if request.dtype is torch.float64:
        return "the kernels compute in float32 and the model's weights are float64"
    return unsupported_config(request.config) or library.unavailable()


def supported_by_graph(request: EncodeRequest) -> str | None:
    """Return why a captured CUDA graph cannot encode with a model, or None if it can.

    The graph runs the model's own modules, so every config is supported but those whose host waits for the GPU.
    """
    config, stored = request.config, str(request.dtype).removeprefix("torch.")
    if request.precision != stored:
        return f"a CUDA graph computes in the stored dtype, {stored}, and not in {request.precision}"
    if any(isinstance(config.layer_feedforward(layer), c.MoE) for layer in range(config.n_layers)):
        return "a CUDA graph cannot wait for the experts that a router chooses"
    if config.changes_frequencies_at is not None:
        return "a CUDA graph cannot choose rotary frequencies by the length of a text"
    return None


ENCODE_KERNELS: tuple[EncodeKernel, ...] = (
    EncodeKernel(
        "cpu-encode", "a forward pass of an encoder over a padded batch", supported_on_cpu,
        "hidden states within 3e-5 of their largest magnitude in float32; lower precisions round the weights",
        "tests/kernels/cpu/decode/test_encoder.py", "cpu",
        native_encoder,
    ),
    EncodeKernel(
        "cuda-encode", "a forward pass of an encoder over a padded batch", supported_by_graph,
        "the operations of the model's own modules: rounding of the dtype, in batches of other sizes",
        "tests/kernels/cuda/graph/test_captured_encoder.py", "cuda",
        lambda model, modules, precision: graph_encoder(model, modules), padded_shape,
    ),
)  # fmt: skip
"""In order of preference."""
