"""Operators of torch with two implementations: a definition in plain torch, and a kernel on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operator(on_gpu: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Turn a definition into an operator that calls `on_gpu` for tensors of a GPU, and the definition for others.

    torch.compile calls an operator as it is, and a CUDA graph can capture it. The compiler runs the definition with
    tensors that have no values, to learn the shapes of the results; these are contiguous.
    """

    def made(definition: Callable[..., Any]) -> Any:
        def shapes(*given: Any) -> Any:
            results = definition(*given)
            return results.contiguous() if isinstance(results, Tensor) else tuple(t.contiguous() for t in results)

        module = definition.__module__.rpartition(".")[2]
        new = torch.library.custom_op(f"glassformer::{module}_{definition.__name__}", definition, mutates_args=())
        new.register_fake(shapes)
        if on_gpu is not None:
            new.register_kernel("cuda")(on_gpu)
        return new

    return made
