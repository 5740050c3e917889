"""What a training kernel puts into a model: another class for a module."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Replacement:
    """A module, the subclass of its class whose `forward` calls a kernel, and attributes that the subclass needs.

    Parameters, buffers and their names stay, so checkpoints and optimizers see the same model.
    """

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)
