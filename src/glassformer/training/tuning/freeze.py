"""`optim.freeze`: which parameters are not trained, chosen by words of their names."""

import re
from collections.abc import Sequence

from torch import nn

from glassformer.config import ConfigError
from glassformer.errors import nearest

BLOCKS = re.compile(r"blocks?\.(\d+)(?:-(\d+))?")


def freeze(model: nn.Module, choices: Sequence[str]) -> list[str]:
    """Stop training the parameters that `optim.freeze` names; return their names."""
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for choice in choices:
        found = {name for name in names if matches(choice, name)}
        if not found:
            words = {"norms", "block.0", *(".".join(name.split(".")[:2]) for name in names), *_words(names)}
            raise ConfigError(f"optim.freeze has {choice!r}, which no parameter matches.{nearest(choice, words)}")
        frozen |= found
    if len(frozen) == len(names):
        raise ConfigError(f"optim.freeze={list(choices)} freezes every parameter: leave something to train.")
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return [name for name in names if name in frozen]


def _words(names: Sequence[str]) -> set[str]:
    return {word for name in names for word in name.split(".") if not word.isdecimal()}


def matches(choice: str, name: str) -> bool:
    """Return whether one word of `optim.freeze` means a parameter."""
    if choice == "norms":
        return any("norm" in word for word in name.split("."))
    if match := BLOCKS.fullmatch(choice):
        first, last = int(match[1]), int(match[2] or match[1])
        block = re.search(r"\.blocks\.(\d+)\.", name)
        return block is not None and first <= int(block[1]) <= last
    return f".{choice}." in f".{name}."
