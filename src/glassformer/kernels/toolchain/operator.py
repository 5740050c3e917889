"""Operators of torch with two implementations: a definition in plain torch, and a kernel on a GPU.

They are registered by `torch.library.Library`. The first call of an operator of `torch.library.custom_op` imports
torch's compiler, which takes as long as importing torch, and a step that is captured without torch.compile needs none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("glassformer", "FRAGMENT")


def operator(on_gpu: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Turn a definition into an operator that calls `on_gpu` for tensors of a GPU, and the definition for others.

    torch.compile calls an operator as it is, and a CUDA graph can capture it. The compiler runs the definition with
    tensors that have no values, to learn the shapes of the results; these are contiguous. Results have no gradient:
    operators are called by autograd functions.
    """

    def made(definition: Callable[..., Any]) -> Any:
        def shapes(*given: Any) -> Any:
            results = definition(*given)
            return results.contiguous() if isinstance(results, Tensor) else tuple(t.contiguous() for t in results)

        name = f"{definition.__module__.rpartition('.')[2]}_{definition.__name__}"
        schema = torch.library.infer_schema(definition, mutates_args=(), op_name=name)
        LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
        LIBRARY.impl(name, definition, "CompositeExplicitAutograd")
        if on_gpu is not None:
            LIBRARY.impl(name, on_gpu, "CUDA")
        torch.library.register_fake(f"glassformer::{name}", shapes, lib=LIBRARY)
        return getattr(torch.ops.glassformer, name).default

    return made
