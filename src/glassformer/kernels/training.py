"""The kernels of training: which there are, which support a run, and how they are installed into a model.

`install_training_kernels` puts them into a model: a module becomes an instance of a subclass whose `forward` calls a
kernel in training steps (`replacement`); parameters and their names stay. Kernels of the loss and of optimizers replace
no module: these look up `head_kernel`, `muon_kernel` and `adamw_kernel`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.config import ConfigError, ModelConfig
from glassformer.kernels.cpu.training import frozen, library, modules
from glassformer.kernels.cpu.training.frozen import frozen_head as frozen_head
from glassformer.kernels.cpu.training.functions import WIDE
from glassformer.kernels.cuda.training import (
    adamw,
    blocks,
    causal,
    experts,
    fp8,
    fp8_cuda,
    fp8_layers,
    loss,
    muon,
    trial,
)
from glassformer.kernels.registry import Kernel, Rule, any_value, any_values, unsupported_field
from glassformer.kernels.replacement import Replacement, replace_modules
from glassformer.kernels.toolchain import cxx, nvrtc
from glassformer.model import Model


@dataclass(frozen=True)
class TrainingRequest:
    """How a model is going to be trained, as far as the choice of kernels depends on it."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    """Dtype of the matmuls."""
    compiled: bool = False
    """True if the step is compiled by torch.compile, which cannot compile the CPU kernels."""
    captured: bool = False
    """True if the step is captured as a CUDA graph without having been compiled."""
    sharded: bool = False
    """True if parameters are sharded over ranks. Most kernels read whole parameters."""
    native: bool = True
    """True if CPU kernels are wanted (`machine.compile = "auto"`)."""
    float8: bool = False
    """True if matmuls are to be in float8 (`machine.products = "float8"`)."""
    muon: bool = False
    """True if the optimizer is Muon."""
    frozen: bool = False
    """True if some parameters are frozen, or have adapters. Most kernels with matmuls compute every gradient."""


AROUND = any_values(
    "vocab_size d_model n_layers n_encoder_layers pooler placement max_len dropout init_std "
    "first_norm residual_scale shared_blocks norm norm.eps norm.bias norm.weight norm.offset "
    "embedding embedding.scale embedding.n_segments embedding.norm embedding.width embedding.project "
    "embedding.project_bias head head.tied head.bias head.scale head.transform head.width head.transform_bias "
    "head.softcap special special.bos special.eos special.pad special.start special.forced_bos special.forced_eos "
    "special.suppressed"
)
"""Fields outside attention and feed-forward. No kernel but the loss reads what they configure."""
POSITION = any_values(
    "position position.offset position.base position.layout position.spacing position.pairing position.fraction "
    "position.scaling position.scaling.factor position.scaling.original_max_len position.scaling.beta_fast "
    "position.scaling.beta_slow position.scaling.attention_factor position.scaling.truncate "
    "position.scaling.low_freq_factor position.scaling.high_freq_factor position.scaling.short "
    "position.scaling.long position.buckets position.max_distance "
    "position.vectors position.vectors.base "
    "position.vectors.layout position.vectors.spacing position.vectors.offset position.scale position.rounded "
    "score_bias score_bias.buckets score_bias.max_distance"
)
"""Positions reach attention as a rotation, a mask or a bias of the call, for which the modules check each call."""
ATTENTION = any_values(
    "attention attention.n_heads attention.n_kv_heads attention.d_head attention.d_value attention.scale "
    "attention.bias attention.out_bias attention.qk_norm attention.qk_norm.eps attention.qk_norm.bias "
    "attention.qk_norm.weight attention.qk_norm.offset attention.qk_norm_over attention.qk_norm_after_rotation "
    "attention.clip attention.window attention.window_layers"
)
"""Fields of attention but for those that change its scores (`softcap`, `sinks`) or its projections (`latent`)."""
FEEDFORWARD = any_values(
    "feedforward feedforward.d_ff feedforward.activation feedforward.bias feedforward.n_experts feedforward.n_active "
    "feedforward.normalize feedforward.expert feedforward.expert.d_ff feedforward.expert.activation "
    "feedforward.expert.bias feedforward.limit feedforward.up_offset feedforward.expert.limit "
    "feedforward.expert.up_offset feedforward.router feedforward.router.score feedforward.router.bias "
    "feedforward.router.scale feedforward.router.correction feedforward.router.groups feedforward.router.top_groups "
    "feedforward.router.group_score feedforward.shared feedforward.shared.d_ff feedforward.shared.activation "
    "feedforward.shared.bias feedforward.shared.limit feedforward.shared.up_offset feedforward.shared_gate"
)
ELSEWHERE = any_values(
    "layer_kinds attention.softcap attention.sinks attention.latent attention.latent.kv_rank attention.latent.d_shared "
    "attention.latent.q_rank attention.latent.norm attention.latent.norm.eps attention.latent.norm.bias "
    "attention.latent.norm.weight attention.latent.norm.offset feedforward.expert.down_bias "
    "feedforward.shared.down_bias"
)
"""Further fields that the experts' kernel may ignore, or which it reads from the experts themselves."""
EVERYTHING = AROUND | POSITION | ATTENTION | FEEDFORWARD
HEAD: dict[str, Rule] = {"head": {"Head"}, "head.transform": {None}, "head.width": {None}, "head.softcap": {None}}
"""The heads of the loss kernels: a matrix, and in some a bias."""
KNOWN_NORMS: dict[str, Rule] = {"norm.weight": {True}, "first_norm": {True}}
"""The scale of a float8 input is computed from the weight of the norm before it."""

FUSED_BLOCKS = "fused blocks"
"""The kernel with which a step needs no torch.compile."""

ALLOWED: dict[str, Mapping[str, Rule]] = {
    "float8 feed-forward": EVERYTHING
    | KNOWN_NORMS
    | {"feedforward": {"dense", "gated"}, "feedforward.down_bias": any_value},
    "float8 projections": EVERYTHING | KNOWN_NORMS,
    "float8 head": EVERYTHING | HEAD | {"head.bias": {False}},
    FUSED_BLOCKS: EVERYTHING
    | {
        "placement": {"pre"},
        "dropout": {0.0},
        "residual_scale": {1.0},
        "first_norm": {True},
        "attention.qk_norm_over": {"head", "all"},
        "attention.qk_norm_after_rotation": {False},
        "attention.clip": {None},
        "feedforward": {"dense", "gated"},
        "feedforward.limit": {None},
        "feedforward.up_offset": {0.0},
        "feedforward.down_bias": any_value,
    },
    "causal attention": EVERYTHING
    | {
        "attention.d_value": {None, causal.WIDTH},
        "attention.qk_norm": {None},
        "attention.window": {None},
        "position": {"learned", "sinusoidal", "none", "rotary"},
        "score_bias": {None},
        "dropout": {0.0},
    },
    "grouped experts": EVERYTHING | ELSEWHERE | {"feedforward": {"moe"}},
    "CUDA loss": EVERYTHING | HEAD,
    "CUDA Muon": EVERYTHING,
    "CUDA AdamW": EVERYTHING | ELSEWHERE | any_values("feedforward.down_bias"),
    "frozen matmuls": EVERYTHING | ELSEWHERE | any_values("feedforward.down_bias"),
    "native attention": EVERYTHING,
    "native feed-forward": EVERYTHING
    | {
        "feedforward": {"dense", "moe"},
        "feedforward.activation": {"gelu", "gelu_tanh"},
        "feedforward.expert": {"dense"},
        "feedforward.expert.activation": {"gelu", "gelu_tanh"},
        "feedforward.shared": {None},
    },
}
"""Of each kernel, the config fields and values that it implements. A field that is not listed must be its default."""


Reason = str | None
"""Why a kernel cannot be used, or None."""


def _float8(config: ModelConfig, request: TrainingRequest) -> Reason:
    return fp8.unsupported_device(request.device) if request.float8 else "machine.products is not 'float8'"


def _float8_projections(config: ModelConfig, request: TrainingRequest) -> Reason:
    sizes = {config.d_model, config.n_heads * config.d_head, config.n_kv_heads * config.d_head}
    sizes |= {config.n_kv_heads * config.d_value, config.n_heads * config.d_value}
    if any(size % fp8.MULTIPLE for size in sizes):
        return f"the widths of the projections {sorted(sizes)} are not all multiples of {fp8.MULTIPLE}"
    return _float8(config, request)


def _float8_feedforward(config: ModelConfig, request: TrainingRequest) -> Reason:
    part = config.feedforward
    if isinstance(part, c.Dense) and part.activation not in fp8_cuda.KINDS:
        return f"feedforward.activation={part.activation!r} is not supported by the kernel"
    return _float8(config, request)


def _on_device(request: TrainingRequest, device: str, dtype: torch.dtype | None = None) -> Reason:
    """Return why a run is not on this device, in this dtype if one is given, with unsharded parameters."""
    if request.device.type != device:
        return f"the device is {request.device.type}, not {device}"
    if dtype not in (None, request.dtype):
        return f"matmuls are in {request.dtype}, not in {dtype}"
    return "parameters are sharded" if request.sharded else None


def _fused_blocks(config: ModelConfig, request: TrainingRequest) -> Reason:
    if not isinstance(config, c.DecoderConfig):
        return "the model is not a decoder"
    if not request.captured or request.compiled or request.float8:
        return "the step is compiled by torch.compile, or not captured as a CUDA graph"
    reason = _on_device(request, "cuda", torch.bfloat16) or _nvrtc(config, request) or blocks.unsupported_widths(config)
    return reason or (None if trial.is_successful(config, request.device) else "the trial on this GPU failed")


def _causal(config: ModelConfig, request: TrainingRequest) -> Reason:
    if not isinstance(config, c.DecoderConfig):
        return "the model is not a decoder"
    if config.d_head != causal.WIDTH:
        return f"heads are {config.d_head} wide, not {causal.WIDTH}"
    if request.compiled and (config.position.kind == "rotary" or config.n_kv_heads != config.n_heads):
        return "heads that are rotated or share keys have another layout in a compiled step"
    if not (request.compiled or request.captured):
        return "the step is neither compiled nor captured"
    reason = _on_device(request, "cuda", torch.bfloat16)
    return reason or (None if causal.available() else "no Hopper GPU with NVRTC was found")


def _grouped_experts(config: ModelConfig, request: TrainingRequest) -> Reason:
    layers = map(config.layer_feedforward, range(config.n_layers))
    parts = [part for part in layers if isinstance(part, c.MoE)]
    if not parts:
        return "no layer has experts"
    sizes = sorted({config.d_model, *(part.expert.d_ff for part in parts)})
    if any(size % experts.MULTIPLE for size in sizes):
        return f"the widths {sizes} are not all multiples of {experts.MULTIPLE}"
    return _on_device(request, "cuda", torch.bfloat16) or experts.unsupported_device(request.device)


def _cuda_loss(config: ModelConfig, request: TrainingRequest) -> Reason:
    if request.float8 and _float8(config, request) is None and not (config.head and config.head.bias):
        return "the head is in float8"
    if request.dtype is not torch.bfloat16:
        return f"logits are in {request.dtype}, not in bfloat16"
    return _nvrtc(config, replace(request, sharded=False))


def _nvrtc(config: ModelConfig, request: TrainingRequest) -> Reason:
    return _on_device(request, "cuda") or (None if nvrtc.can_launch() else "NVRTC was not found")


def _muon(config: ModelConfig, request: TrainingRequest) -> Reason:
    return _nvrtc(config, request) if request.muon else "the optimizer is not Muon"


def _native(request: TrainingRequest) -> Reason:
    if (reason := _on_device(request, "cpu")) is not None:
        return reason
    if not request.native:
        return "machine.compile is not 'auto'"
    if cxx.register_bits() < 256:
        return "it is slower than torch without AVX2 (docs/benchmarks_history.md)"
    return None if cxx.compiler() else "no C++ compiler was found"


def _native_attention(config: ModelConfig, request: TrainingRequest) -> Reason:
    if config.d_head % WIDE or config.d_value % WIDE:
        return f"heads are {config.d_head} and {config.d_value} wide, which are not multiples of {WIDE}"
    return _native(request)


WIDEST_FEEDFORWARD = {512: 384, 256: 128}
"""By the bits of the vector registers: the widest model whose feed-forward is faster in the kernel than in torch on an
AMD processor. On Intel processors torch's matmuls are faster (docs/benchmarks_history.md)."""


def _native_feedforward(config: ModelConfig, request: TrainingRequest) -> Reason:
    if config.d_model % WIDE or config.d_ff % (2 * WIDE):
        return f"d_model={config.d_model} and d_ff={config.d_ff} are not multiples of {WIDE} and {2 * WIDE}"
    if request.dtype is not torch.float32:
        return f"matmuls are in {request.dtype}, not in float32"
    if cxx.is_intel() or config.d_model > WIDEST_FEEDFORWARD.get(cxx.register_bits(), 0):
        return "torch's matmuls are faster at this width on this processor (docs/benchmarks_history.md)"
    return _native(request)


def _frozen(config: ModelConfig, request: TrainingRequest) -> Reason:
    """Why frozen matrices are not multiplied by their kernel. In bfloat16 it needs no particular processor."""
    if not request.frozen:
        return "no parameter is frozen"
    if (reason := _on_device(request, "cpu")) is not None:
        return reason
    if not request.native or request.compiled:
        return "machine.compile is not 'auto'"
    if request.dtype is torch.bfloat16:
        return None
    if cxx.is_intel() or cxx.register_bits() != 512:
        return "oneDNN's float32 matmuls were measured to be faster on AMD processors with AVX-512 only"
    return None if frozen.supports_onednn() else "torch was built without oneDNN"


@dataclass(frozen=True)
class TrainingKernel(Kernel):
    """A training kernel, and which modules of a model it replaces."""

    replacements: Callable[[Model], Iterator[Replacement]] | None = None
    """Yield the modules with their new classes; None if the loss or an optimizer looks the kernel up."""


def _kernel(
    name: str,
    replaces: str,
    machine: Callable[[ModelConfig, TrainingRequest], Reason],
    accuracy: str,
    test: str,
    replacements: Callable[[Model], Iterator[Replacement]] | None = None,
) -> TrainingKernel:
    def supports(config: ModelConfig, request: TrainingRequest) -> Reason:
        """Check first the config fields (ALLOWED), then shapes, dtype and device."""
        if request.frozen and name not in ("frozen matmuls", "native attention", "CUDA AdamW", "CUDA Muon"):
            return "some parameters are frozen"
        return unsupported_field(config, ALLOWED[name]) or machine(config, request)

    return TrainingKernel(name, replaces, supports, accuracy, f"tests/kernels/{test}.py", replacements)


BFLOAT16 = "the rounding of bfloat16: 2^-7 of the largest value"
FLOAT32 = "float32 sums in another order: loss 1e-5, gradients 1e-4 relative"
FLOAT8 = "the rounding of e4m3 (2^-4) and e5m2 (2^-3): gradients of a feed-forward 7 to 9 % root mean square"
TRAINING_KERNELS: tuple[TrainingKernel, ...] = (
    _kernel("float8 feed-forward", "model.layers.Dense and Gated", _float8_feedforward, FLOAT8,
            "cuda/training/test_fp8_layers", fp8_layers.feedforward_replacements),
    _kernel("float8 projections", "projections of model.attention.Attention", _float8_projections, FLOAT8,
            "cuda/training/test_fp8_layers", fp8_layers.projection_replacements),
    _kernel("float8 head", "training.chunked_loss.head_gradients", _float8, FLOAT8, "cuda/training/test_fp8"),
    _kernel(FUSED_BLOCKS, "model.block.PreNormBlock, the last norm, a tied embedding", _fused_blocks, BFLOAT16,
            "cuda/training/test_blocks", blocks.replacements),
    _kernel("causal attention", "F.scaled_dot_product_attention, backward", _causal, BFLOAT16,
            "cuda/training/test_causal", causal.replacements),
    _kernel("grouped experts", "model.moe.MoE", _grouped_experts, BFLOAT16, "cuda/training/test_experts",
            experts.replacements),
    _kernel("CUDA loss", "training.chunked_loss.head_gradients", _cuda_loss, BFLOAT16, "cuda/training/test_loss"),
    _kernel("CUDA Muon", "training.muon.Muon, elementwise passes", _muon, "one step of bfloat16 before rounding",
            "cuda/training/test_muon"),
    _kernel("CUDA AdamW", "training.optimizers.AdamW and gradient_norm", _nvrtc,
            "float32 sums in another order: 1e-6 relative", "cuda/training/test_adamw"),
    _kernel("frozen matmuls", "model.adapters.AdaptedLinear, frozen nn.Linear, the frozen head", _frozen, FLOAT32,
            "cpu/training/test_frozen", frozen.frozen_replacements),
    _kernel("native attention", "model.attention.Attention", _native_attention, FLOAT32, "cpu/training/test_modules",
            modules.attention_replacements),
    _kernel("native feed-forward", "model.layers.Dense", _native_feedforward, FLOAT32, "cpu/training/test_modules",
            modules.dense_replacements),
)  # fmt: skip
"""In the order of installation: a module that one kernel has replaced is not replaced by a later one."""


def choose_training_kernels(config: ModelConfig, request: TrainingRequest) -> list[str]:
    """Return the names of the kernels that support a config and a request."""
    return [kernel.name for kernel in TRAINING_KERNELS if kernel.supports(config, request) is None]


def needs_no_compiler(config: ModelConfig, request: TrainingRequest) -> bool:
    """Return whether the kernels carry a captured step, so that torch.compile would only take time."""
    return any(kernel.name == FUSED_BLOCKS and kernel.supports(config, request) is None for kernel in TRAINING_KERNELS)


def install_training_kernels(model: Model, request: TrainingRequest) -> list[str]:
    """Install every kernel that supports the model and the request; return the names of those that are used.

    Raise ConfigError if float8 is requested on a device without it. If the C++ compiler fails, the engine is used.
    """
    if request.float8 and (reason := fp8.unsupported_device(request.device)):
        raise ConfigError(f"{reason}: use machine.products='precision'.")
    chosen = [kernel for kernel in TRAINING_KERNELS if kernel.supports(model.config, request) is None]
    if any(kernel.name.startswith("native") for kernel in chosen):
        try:
            library.load()
        except cxx.CompileError:
            chosen = [kernel for kernel in chosen if not kernel.name.startswith("native")]
    return [kernel.name for kernel in chosen if not kernel.replacements or replace_modules(kernel.replacements(model))]


def head_kernel(
    device: torch.device, dtype: torch.dtype, float8: bool
) -> tuple[Callable[[Tensor, int], Any] | None, Callable[..., Any]] | None:
    """Return (preparation of the weight, gradients of a chunk) for a head and loss in chunks, or None for plain torch.

    Without a preparation, the weight is cast to `dtype` and padded.
    """
    if float8:
        return fp8.cast_measured, fp8.head_gradients
    if device.type == "cuda" and dtype is torch.bfloat16 and nvrtc.can_launch():
        return (None if torch.compiler.is_compiling() else adamw.copies.of_head), loss.head_gradients
    return None


def muon_kernel(matrices: list[Tensor], rate: float | Tensor) -> ModuleType | None:
    """Return the module with the passes of Muon over matrices of one shape, or None for plain torch."""
    return muon if muon.supports_call(matrices, rate) else None


def adamw_kernel(optimizer: adamw.AdamW) -> ModuleType | None:
    """Return the module with AdamW's step in one pass, or None for torch's operator."""
    return adamw if adamw.supports_call(optimizer) else None


def norm_kernel(gradients: list[Tensor]) -> Any:
    """Return the module with the norm of all gradients in few launches, or None for torch's operators."""
    return adamw if adamw.supports_norm(gradients) else None
