"""How the devices of a plan share the work: the settings of [machine] that `glass train` has, and which are possible.

    data         every device has the whole model (ddp)
    sharded      each of n devices has 1/n of weights, gradient and optimizer state (fsdp)
    replicate r  r copies of a sharded model: weights are gathered within a copy, gradients are summed over all (HSDP)
    tensor t     t devices divide heads, hidden units and vocabulary; what each has is sharded over the others
    context c    c devices divide each sequence; they are among the devices over which weights are sharded

The last three can be combined: `tensor 2 x context 4`.
"""

import dataclasses
import math
from dataclasses import dataclass

from glassformer.config import ModelConfig
from glassformer.config.placement import indivisible, part_not_supported, sequence_not_supported
from glassformer.sizing.devices import Device

DEGREES = (2, 4, 8, 16, 32, 64)
"""Degrees of tensor and context parallelism that plans try."""


@dataclass(frozen=True)
class Strategy:
    """The fields of [machine] that say how ranks share the work."""

    is_sharded: bool = True
    replicate: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """The numbers of devices by field, of those that are more than one."""
        named = {"replicate": self.replicate, "tensor": self.tensor, "context": self.context}
        return {name: n for name, n in named.items() if n > 1}

    @property
    def settings(self) -> dict[str, str | int]:
        return {"parallel": "fsdp" if self.is_sharded else "ddp", **self.degrees}

    def __str__(self) -> str:
        if not self.is_sharded:
            return "data"
        return " x ".join(f"{name} {n}" for name, n in self.degrees.items()) or "sharded"

    def shards(self, gpus: int) -> int:
        """Return over how many devices each tensor is sharded."""
        return gpus // (self.replicate * self.tensor) if self.is_sharded else 1


def parse_strategy(text: str) -> Strategy:
    """Return the strategy of a text such as `sharded` or `tensor 2 x context 4`."""
    if text in ("data", "sharded"):
        return Strategy(text == "sharded")
    found: dict[str, int] = {}
    for part in text.split(" x "):
        name, _, degree = part.partition(" ")
        if name not in ("replicate", "tensor", "context") or not degree.isdigit() or int(degree) < 2 or name in found:
            raise ValueError(
                f"strategy={text!r} is not known: use 'data', 'sharded', 'tensor 2', 'context 2', 'replicate 2', or a "
                "combination such as 'tensor 2 x context 4'."
            )
        found[name] = int(degree)
    return Strategy(**found)  # type: ignore[arg-type]


def why_impossible(strategy: Strategy, config: ModelConfig, gpus: int, device: Device, length: int) -> str | None:
    """Return why `glass train` cannot train sequences of `length` tokens this way; None if it can."""
    degree = math.prod(strategy.degrees.values())
    if strategy.tensor > device.per_machine or gpus % degree:
        return (
            f"on {gpus} devices: the degree must divide the number of devices and, of tensor, be at most "
            f"{device.per_machine}, the devices of one machine"
        )
    if strategy.tensor > 1:
        if (number := indivisible(config, strategy.tensor)) is not None:
            return f"{strategy.tensor} does not divide the {number} of the model"
        if (problem := part_not_supported(config)) is not None:
            return f"tensor parallelism does not support {problem}"
    if strategy.context > 1:
        if length % (2 * strategy.context):
            return f"a context of {length} tokens is not a multiple of 2 x {strategy.context}"
        if (problem := sequence_not_supported(config)) is not None:
            return f"context parallelism does not support {problem}"
    return None


def strategies(gpus: int, device: Device, config: ModelConfig, length: int) -> list[Strategy]:
    """Return the strategies with which `glass train` can train a model on this many devices, simple ones first.

    Copies of a sharded model are planned as one per machine, and combined with tensor parallelism.
    """
    if gpus == 1:
        return [Strategy(is_sharded=False)]
    tensor = [Strategy(tensor=n) for n in DEGREES]
    context = [Strategy(context=n) for n in DEGREES]
    machines = gpus // device.per_machine
    copied = [Strategy(replicate=machines)] if machines > 1 else []
    both = [dataclasses.replace(one, context=other.context) for one in tensor for other in context]
    both += [dataclasses.replace(one, replicate=other.replicate) for one in tensor for other in copied]
    found = [Strategy(is_sharded=False), Strategy(), *copied, *tensor, *context, *both]
    return [one for one in found if why_impossible(one, config, gpus, device, length) is None]
