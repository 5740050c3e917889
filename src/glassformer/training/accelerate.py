"""What a run uses of its machine: device, dtype, torch.compile or captured steps, and kernels.

This is the one place where training uses `glassformer.kernels`. Without that package, training runs in plain torch.
"""

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.config import ConfigError, ModelConfig
from glassformer.model import Model
from glassformer.model.block import Stack
from glassformer.model.device import choose_for_training
from glassformer.model.positions import Rotary

if TYPE_CHECKING:
    from glassformer.training.run import Run

kernels: types.ModuleType | None
try:
    from glassformer.kernels import training as kernels
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("glassformer.kernels"):
        raise
    kernels = None


def kernel_request(
    run: "Run", device: torch.device, dtype: torch.dtype, compiled: bool, sharded: bool = False, alone: bool = True
) -> dict[str, Any]:
    """Return what the choice of kernels depends on: the fields of `kernels.training.TrainingRequest`."""
    return {
        "device": device,
        "dtype": dtype,
        "compiled": compiled,
        "captured": not compiled and is_capturable(run, device, alone),
        "sharded": sharded,
        "native": run.machine.compile == "auto",
        "float8": run.machine.products == "float8",
        "muon": run.optim.kind == "muon",
    }


def is_capturable(run: "Run", device: torch.device, alone: bool) -> bool:
    """Return whether the steps of a run can be captured as a CUDA graph: one process, every step the same kernels."""
    plain = run.loop.accumulate == 1 and run.chat is None and run.machine.recompute == "no"
    return device.type == "cuda" and alone and plain


def choose_machine(run: "Run", alone: bool = True) -> tuple[torch.device, torch.dtype, bool]:
    """Return the device, the dtype of the matmuls, and whether to compile with torch.compile.

    `alone`: no other process trains the same model.
    """
    wanted = run.machine
    choice = choose_for_training(wanted.device, wanted.precision, run.model.d_model)
    # on a CPU, torch.compile was measured to be about neutral and takes half a minute, so it runs only on request; the
    # CPU kernels compile in seconds, once
    compiled = wanted.compile == "yes" or (wanted.compile == "auto" and choice.device == "cuda")
    if run.lora is not None and run.lora.quantize != "no":
        compiled = False  # torch's compiler fails on the codes of NF4
    device = torch.device(choice.device)
    if compiled and wanted.compile == "auto" and run.lora is None and not run.optim.freeze:
        request = kernel_request(run, device, choice.dtype, False, alone=alone)
        compiled = not needs_no_compiler(run.model, **request)
    return device, choice.dtype, compiled


def install(model: Model, **request: Any) -> list[str]:
    """Install the kernels that support a model and a request; return their names.

    `request` holds the fields of `kernels.training.TrainingRequest`.
    """
    if kernels is None:
        if request.get("float8"):
            raise ConfigError(
                "machine.products='float8' needs glassformer.kernels, which is not installed: use "
                "machine.products='precision'."
            )
        return []
    names: list[str] = kernels.install_training_kernels(model, kernels.TrainingRequest(**request))
    return names


def choose(config: ModelConfig, **request: Any) -> list[str]:
    """Return the names of the kernels that `install` would choose, without a model."""
    if kernels is None:
        return []
    names: list[str] = kernels.choose_training_kernels(config, kernels.TrainingRequest(**request))
    return names


def needs_no_compiler(config: ModelConfig, **request: Any) -> bool:
    """Return whether kernels carry the step, so that it is captured without torch.compile."""
    return kernels is not None and bool(kernels.needs_no_compiler(config, kernels.TrainingRequest(**request)))


def renew_copies(parameters: list[torch.nn.Parameter]) -> None:
    """Renew the copies of weights that kernels keep in another dtype."""
    if kernels is not None:
        kernels.adamw.copies.renew(parameters)


def fill_tables(model: Model, context: int, device: torch.device) -> None:
    """Compute the tables of rotary positions before a step is compiled.

    A table that is first computed inside a compiled step changes what the step was compiled for: the whole model would
    be compiled a second time.
    """
    positions = torch.arange(context, device=device)[None]
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        schemes = [stack.position, *(stack.kinds.others if stack.kinds else ())]
        for scheme in (one for one in schemes if isinstance(one, Rotary)):
            for dtype in (torch.float32, torch.bfloat16):
                scheme.rotation(positions, dtype, context - 1)


def head_kernel(
    device: torch.device, dtype: torch.dtype, float8: bool
) -> tuple[Callable[[Tensor, int], Any] | None, Callable[..., Any]] | None:
    """Return (preparation of the weight, gradients of a chunk) of a faster head and loss, or None."""
    if kernels is None:
        assert not float8, "`install` refuses float8 without kernels"
        return None
    found: tuple[Callable[[Tensor, int], Any] | None, Callable[..., Any]] | None
    found = kernels.head_kernel(device, dtype, float8)
    return found


def leave_to_embedding(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Return the gradient of the head's weight; None if an embedding with the same weight takes it."""
    if kernels is None or torch.compiler.is_compiling() or not hasattr(weight, kernels.blocks.embedding.SLOT):
        return gradient
    left: Tensor | None = kernels.blocks.embedding.leave(weight, gradient)
    return left


def frozen_head(weight: Tensor, dtype: torch.dtype) -> Any:
    """Return how a frozen head is multiplied on a CPU (`prepare`, `multiply`, `rows`), or None for plain torch."""
    return None if kernels is None else kernels.frozen_head(weight, dtype)


def muon_kernel(matrices: list[Tensor], rate: float | Tensor) -> types.ModuleType | None:
    """Return the module with faster passes of Muon over matrices of one shape, or None."""
    if kernels is None:
        return None
    found: types.ModuleType | None = kernels.muon_kernel(matrices, rate)
    return found


def adamw_kernel(optimizer: Any) -> types.ModuleType | None:
    """Return the module with a faster step of AdamW, or None."""
    if kernels is None:
        return None
    found: types.ModuleType | None = kernels.adamw_kernel(optimizer)
    return found


def norm_kernel(gradients: list[Tensor]) -> Any:
    """Return the module with a faster norm of all gradients, or None."""
    on_gpu = bool(gradients) and gradients[0].is_cuda
    return kernels.norm_kernel(gradients) if kernels is not None and on_gpu else None
