"""What every contender is asked and how it answers."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Mark = Callable[[], None]
"""To be called when a token of every row is there."""


@dataclass(frozen=True)
class Order:
    """All that a contender's process is told."""

    name: str
    module: str
    task: str
    precision: str
    folder: str
    """Of the model: `hf` in it is the Hugging Face folder, other names are conversions."""
    threads: int = 1
    prompts: tuple[tuple[int, ...], ...] = ()
    new: int = 1
    """Tokens, or training steps of a turn."""
    checkout: str = ""
    setting: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of training: batch, seed."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Order":
        data = json.loads(line)
        return cls(**{**data, "prompts": tuple(map(tuple, data["prompts"]))})

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.root / "hf"

    @property
    def length(self) -> int:
        """Tokens of a row in the end."""
        return len(self.prompts[0]) + self.new


class Speaker(Protocol):
    """A loaded model."""

    version: str

    def speak(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        """Greedy continuation of every prompt, `new` tokens, never stopping early; the new ids."""


def library(name: str) -> Any:
    """A peer's package, imported when its turn comes and by its own process only."""
    return importlib.import_module(name)


def config_of(order: Order) -> dict[str, Any]:
    """The model's config.json."""
    data: dict[str, Any] = json.loads((order.model / "config.json").read_text(encoding="utf-8"))
    return data


def arrays(order: Order) -> dict[str, Any]:
    """The model's tensors as NumPy arrays, by their names without the prefix."""
    from safetensors import numpy

    read = {}
    for file in sorted(order.model.glob("*.safetensors")):
        read.update(numpy.load_file(file))
    return {name.removeprefix("transformer."): value for name, value in read.items()}
