"""Copies in bfloat16 of parameters that matmuls read: written by AdamW together with the parameters.

A step that is captured casts nothing then. Parameters that are read together, such as the weights of queries, keys and
values, have copies that are parts of one matrix, so that one matmul reads them.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ROOM, COPY = "bfloat16_room", "bfloat16_copy"
"""Attributes of a parameter that matmuls read in bfloat16: the place of its copy, (Room, index); its copy, once an
optimizer keeps that up to date."""


class Room:
    """Memory for the copies of some parameters, one below the other. It is allocated when the first copy is made."""

    def __init__(self, parameters: tuple[Tensor, ...]):
        self.sizes = [len(p) for p in parameters]
        self.shape, self.device = (sum(self.sizes), *parameters[0].shape[1:]), parameters[0].device
        self.whole: Tensor | None = None

    def part(self, index: int) -> Tensor:
        """Return the memory of one copy."""
        if self.whole is None:
            self.whole = torch.empty(self.shape, dtype=torch.bfloat16, device=self.device)
        return self.whole.split(self.sizes)[index]


def in_bfloat16(*parameters: Tensor, narrow: bool = True) -> Tensor:
    """Return parameters in bfloat16, one below the other: their copies, if they have any.

    Steps that are not captured renew the copies. `narrow`: gradients of weights with copies are bfloat16, too.
    """
    if not all(hasattr(p, COPY) for p in parameters):
        room = Room(parameters)
        for index, p in enumerate(parameters):
            if not hasattr(p, COPY):
                setattr(p, ROOM, (room, index))
        return _joined([p.to(torch.bfloat16) for p in parameters])
    for p in parameters:
        if not (p.is_cuda and torch.cuda.is_current_stream_capturing()):
            _renew(p)
            if narrow and p.dim() > 1 and p.grad is None and hasattr(p, "grad_dtype"):  # torch 2.10 and later
                p.grad_dtype = torch.bfloat16
    room = getattr(parameters[0], ROOM)[0]
    if [getattr(p, ROOM) for p in parameters] == [(room, index) for index in range(len(room.sizes))]:
        whole: Tensor = room.whole
        return whole
    return _joined([getattr(p, COPY) for p in parameters])


def of_head(weight: Tensor, rows: int) -> Tensor:
    """Return the weight of a head in bfloat16, with rows of zeros up to `rows` in all."""
    if rows == len(weight) and weight.is_leaf and weight.requires_grad:
        return in_bfloat16(weight, narrow=False)
    return F.pad(weight.to(torch.bfloat16), (0, 0, 0, rows - len(weight)))


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of a parameter is kept."""
    return torch.bfloat16 if getattr(parameter, "grad_dtype", None) is torch.bfloat16 else torch.float32


def make(parameters: Iterable[Tensor]) -> None:
    """Give parameters the copies that matmuls have asked for."""
    for parameter in parameters:
        if hasattr(parameter, ROOM) and not hasattr(parameter, COPY):
            room, index = getattr(parameter, ROOM)
            setattr(parameter, COPY, room.part(index))
            _renew(parameter)


def renew(parameters: Iterable[Tensor]) -> None:
    """Make every copy equal to its parameter, after something else than a step has changed parameters."""
    for parameter in parameters:
        if hasattr(parameter, COPY):
            _renew(parameter)


def _renew(parameter: Tensor) -> None:
    # through `data`: a block that is used twice in a step renews what its first use has saved, with equal numbers
    getattr(parameter, COPY).data.copy_(parameter.detach())
