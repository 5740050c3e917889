"""The order that a contender's process receives, and the interface of a loaded model."""

import dataclasses
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Mark = Callable[[], None]
"""Called after each step, when every sequence has a new token."""


SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
"""How tokens are drawn if they are: the defaults of `glass sample`."""


@dataclass(frozen=True)
class Order:
    """Everything that a contender's process receives."""

    name: str
    module: str
    task: str
    precision: str
    folder: str
    """Folder of the model: `hf` in it is the Hugging Face folder, other names are conversions."""
    threads: int = 1
    prompts: tuple[tuple[int, ...], ...] = ()
    new: int = 1
    """New tokens, or training steps, per turn."""
    checkout: str = ""
    setting: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of a task, such as the batch of training."""
    device: str = "cpu"

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
    def text(self) -> Path:
        """The text that start-up of training reads, made of words `t0`, `t1`, …."""
        return self.root / "words.txt"

    @property
    def words(self) -> Path:
        """The tokenizer of that text, with the vocabulary of the model."""
        return self.root / "words.json"

    @property
    def length(self) -> int:
        """Length of a sequence at the end, in tokens."""
        return len(self.prompts[0]) + self.new


class Generator(Protocol):
    """A loaded model."""

    version: str

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        """Return the greedy continuation of every prompt: `new` ids each, without stopping early.

        Peers that can sample have an argument `sampled`: True draws the tokens as SAMPLING says. Peers with beam search
        have `beams`; then `mark` is not called.
        """


def wait(device: str) -> None:
    """Wait until the device has finished all work that was launched; a CPU has none."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def library(name: str) -> Any:
    """Import a peer's package, in the peer's own process only."""
    return importlib.import_module(name)


def convert_once(target: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make a file or folder next to its target, then rename it; nothing is done if the target exists."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / target.name
        write(made)
        os.replace(made, target)


def config_of(order: Order) -> dict[str, Any]:
    """Return the model's config.json."""
    data: dict[str, Any] = json.loads((order.model / "config.json").read_text(encoding="utf-8"))
    return data


def arrays(order: Order) -> dict[str, Any]:
    """Return the model's tensors as NumPy arrays, by their names without the prefix."""
    from safetensors import numpy

    read = {}
    for file in sorted(order.model.glob("*.safetensors")):
        read.update(numpy.load_file(file))
    return {name.removeprefix("transformer."): value for name, value in read.items()}
