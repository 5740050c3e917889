"""Where a model is examined: a device by its name, and a copy of the model there."""

import copy
from typing import Any

import torch
from torch import nn

from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.isolate import quiet

KNOWN = "cpu, cuda, cuda:1 or mps"


def find_device(wanted: str | torch.device) -> torch.device:
    """Return the device of a name. Raises CannotExamineError if the name is unknown or the machine has no such device.

    A name without a number is the first device of its type, so that `cuda` and `cuda:0` are the same.
    """
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError, ValueError):
        raise CannotExamineError(f"device {str(wanted)!r} is not known: use {KNOWN}.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise CannotExamineError(f"device 'meta' holds no numbers to examine: use {KNOWN}.")
    count = _count(device.type)
    if count == 0:
        raise CannotExamineError(
            f"device {str(wanted)!r} was requested, but torch finds no {device.type} device on this machine: use cpu."
        )
    index = device.index or 0
    if index >= count:
        last = f"{device.type}:{count - 1}"
        raise CannotExamineError(
            f"device {str(wanted)!r} was requested, but the last {device.type} device of this machine is {last}: use "
            f"{last} or cpu."
        )
    return torch.device(device.type, index)


def _count(kind: str) -> int:
    """How many devices of a type this machine has."""
    try:
        module = torch.get_device_module(kind)
        return int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):
        return 0


def device_name(device: torch.device) -> str:
    """Return the device with the name of its hardware: `cuda:0 (NVIDIA H200)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def moved(model: Any, device: torch.device) -> Any:
    """Return a copy of the model on a device, or the model itself if all of it is there or it is no module.

    Raises CannotExamineError if it cannot be copied or does not fit there.
    """
    if not isinstance(model, nn.Module):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    if all(_at(t.device) == device for t in tensors):
        return model
    name = type(model).__name__
    try:
        with quiet():
            twin = copy.deepcopy(model)
    except Exception as error:
        raise CannotExamineError(
            f"{name} cannot be copied ({type(error).__name__}), so it cannot be moved to {device}: move it first, "
            f"model.to('{device}')."
        ) from None
    try:
        return twin.to(device)
    except (RuntimeError, NotImplementedError) as error:  # out of memory is a RuntimeError
        text = " ".join(str(error).split())[:160].rstrip(".")
        raise CannotExamineError(f"{name} cannot be moved to {device}: {text}.") from None


def _at(device: torch.device) -> torch.device:
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)
