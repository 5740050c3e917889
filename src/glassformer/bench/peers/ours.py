"""glassformer itself: the compiled kernels in any precision, and the plain engine."""

from typing import Any

from glassformer.bench.peers.base import Mark, Order


class Peer:
    """`glassformer.generation.stream`, as a user would call it."""

    def __init__(self, order: Order):
        import torch

        from glassformer import __version__
        from glassformer.weights import load

        torch.set_num_threads(order.threads)
        self.version = __version__
        self.native = order.name == "glassformer"
        self.precision = order.precision
        self.model = load(order.model, dtype="float32" if self.native else order.precision)
        if self.native:
            from glassformer.kernels.cpu.decode import library

            library.load()  # compiled once per machine and version, then cached on disk

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        from glassformer.generation import stream

        rows: list[list[int]] = [[] for _ in prompts]
        engine, precision = ("native" if self.native else "torch"), self.precision
        for gained in stream(
            self.model, prompts, new, stop=[], engine=engine, precision=precision  # type: ignore[arg-type]
        ):  # fmt: skip
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
        self.engine, self.precision = ("native" if order.name == "glassformer" else "torch"), order.precision
        self.model = load(order.model, dtype="float32")

    def encode(self, texts: tuple[tuple[int, ...], ...]) -> list[Any]:
        from glassformer.generation import encode

        return list(encode(self.model, texts, engine=self.engine, precision=self.precision))  # type: ignore[arg-type]
