"""glassformer itself: the compiled kernels in any precision, and the plain engine.

On a CPU the kernels are asked for by name, so that a model that they do not support is reported. On a GPU, and in a
copy without kernels, the engine is `auto`, as a user finds it.
"""

import importlib.util
from typing import Any

from glassformer.bench.peers.base import SAMPLING, Mark, Order

PRECISION = {"float8": "fp8"}
"""Precisions that have another name in `generate`."""
CHUNK = 1024
"""Tokens of a prompt that the reference reads at a time."""


def _engine(order: Order) -> str:
    if order.name != "glassformer":
        return "torch"
    installed = importlib.util.find_spec("glassformer.kernels") is not None
    return "native" if order.device == "cpu" and installed else "auto"


def _stored(order: Order) -> str:
    """Return the dtype in which the weights are loaded. The kernels of a CPU round float32 weights themselves."""
    if _engine(order) == "native":
        return "float32"
    return order.precision if order.precision in ("float32", "bfloat16") else "bfloat16"


class Peer:
    """`glassformer.generation.stream`, as a user would call it."""

    def __init__(self, order: Order):
        import torch

        from glassformer import __version__
        from glassformer.weights import load

        torch.set_num_threads(order.threads)
        self.version, self.task = __version__, order.task
        self.engine, self.precision = _engine(order), PRECISION.get(order.precision, order.precision)
        self.model = load(order.model, dtype=_stored(order), device=order.device)
        if self.engine == "native":
            from glassformer.kernels.cpu.decode import library

            library.load()  # compiled once per machine and version, then cached on disk

    def generate(
        self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark, sampled: bool = False, beams: int = 1
    ) -> list[list[int]]:
        from glassformer.generation import Sampling, generate, stream

        rows: list[list[int]] = [[] for _ in prompts]
        options: Any = {"engine": self.engine, "precision": self.precision}
        if sampled:
            options["sampling"] = Sampling(**SAMPLING)
        if self.task == "reference":  # in float32 torch stores the scores of all its tokens at once
            options["prefill_chunk"] = CHUNK
        if beams > 1:
            return generate(self.model, prompts, new, beams=beams, stop=[], **options).new
        for gained in stream(self.model, prompts, new, stop=[], **options):
            mark()
            for row, token in zip(rows, gained, strict=True):
                assert token is not None  # stop=[]: no sequence ends early
                row.append(token)
        return rows


class Encoder:
    """`glassformer.encode`, as a user would call it."""

    def __init__(self, order: Order):
        import torch

        from glassformer import __version__
        from glassformer.weights import load

        torch.set_num_threads(order.threads)
        self.version = __version__
        self.engine = _engine(order)
        on_cpu = order.device == "cpu"
        self.precision = order.precision if on_cpu else "auto"  # a GPU computes in the stored dtype
        self.model = load(order.model, dtype="float32" if on_cpu else order.precision, device=order.device)

    def encode(self, texts: tuple[tuple[int, ...], ...]) -> list[Any]:
        from glassformer.generation import encode

        states = encode(self.model, texts, engine=self.engine, precision=self.precision)  # type: ignore[arg-type]
        if states[0].device.type == "cpu":
            return [state.float() for state in states]
        return in_one_transfer(states)


def in_one_transfer(states: list[Any]) -> list[Any]:
    """Return hidden states on the host in float32. The host waits for the device once, as for transformers."""
    import torch

    return list(torch.cat(states).cpu().float().split([len(state) for state in states]))
