"""What a training kernel puts into a model: another class for a module."""

from collections.abc import Iterable
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


def replace_modules(replacements: Iterable[Replacement]) -> bool:
    """Change the class of each module; return whether there was one."""
    found = list(replacements)
    for replacement in found:
        replacement.module.__class__ = replacement.kind
        for name, value in replacement.attributes.items():
            setattr(replacement.module, name, value)
    return bool(found)
