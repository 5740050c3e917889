"""What a run uses of its machine: device, dtype, torch.compile or captured steps, and the request for kernels."""

from typing import Any

import torch

from glassformer.model.device import choose_for_training
from glassformer.training import accelerate
from glassformer.training.run import Run


def kernel_request(
    run: Run, device: torch.device, dtype: torch.dtype, compiled: bool, sharded: bool = False, alone: bool = True
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


def is_capturable(run: Run, device: torch.device, alone: bool) -> bool:
    """Return whether the steps of a run can be captured as a CUDA graph: one process, every step the same kernels."""
    plain = run.loop.accumulate == 1 and run.chat is None and run.machine.recompute == "no"
    return device.type == "cuda" and alone and plain


def choose_machine(run: Run, alone: bool = True) -> tuple[torch.device, torch.dtype, bool]:
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
        compiled = not accelerate.needs_no_compiler(run.model, **request)
    return device, choice.dtype, compiled
