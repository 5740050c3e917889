"""A model that returns one vector for each sequence, such as a classifier, examined as the encoder inside it.

Its output at a position is what its last module over all positions gives there, and next to it the vector: so every
part of the model is examined, and each position must still ignore padding and other sequences.
"""

from typing import Any

import torch
from torch import Tensor, nn

from glassformer.shapes import Float, Int


class Tokenwise(nn.Module):
    """A classifier that returns (B,T,·). A token that it puts before the others is left out."""

    def __init__(self, model: nn.Module, path: str):
        super().__init__()
        self.model, self.path = model, path

    def forward(self, tokens: Int[Tensor, "B T"], **given: Any) -> Float[Tensor, "B T D"]:
        kept = list[Tensor]()

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found = over_tokens(output, tokens)
            if found is not None:
                kept.append(found)

        handle = self.model.get_submodule(self.path).register_forward_hook(keep)
        try:
            vector = vector_in(self.model(tokens, **given), len(tokens))
        finally:
            handle.remove()
        if not kept or vector is None:
            raise RuntimeError(f"{self.path} gave nothing for every token")
        length = tokens.shape[1]
        return torch.cat([kept[-1][:, -length:], vector[:, None].expand(-1, length, -1)], dim=-1)


def vector_in(output: Any, rows: int) -> Tensor | None:
    """One vector for each sequence in what a model returned: (B,C)."""
    if isinstance(output, Tensor):
        values: list[Any] = [output]
    elif isinstance(output, dict):
        values = list(output.values())
    else:
        values = list(output) if isinstance(output, tuple | list) else list(vars(output).values())
    fits = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 2 and len(v) == rows]
    return fits[0] if fits else None


def over_tokens(output: Any, tokens: Tensor) -> Tensor | None:
    """A vector for each position, and perhaps for one more at the start."""
    values = output if isinstance(output, tuple | list) else [output]
    for value in values:
        fits = isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()
        if fits and len(value) == len(tokens) and value.shape[1] - tokens.shape[1] in (0, 1):
            return value
    return None


def tokenwise(model: nn.Module, tokens: Int[Tensor, "B T"], **given: Any) -> Tokenwise | None:
    """Wrap a classifier around the last of its modules that gives something for every token; None if none does."""
    order, handles = list[str](), []
    for name, module in model.named_modules():

        def keep(m: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if name and over_tokens(output, tokens) is not None:
                order.append(name)

        handles.append(module.register_forward_hook(keep))
    try:
        with torch.no_grad():
            vector = vector_in(model(tokens, **given), len(tokens))
    finally:
        for handle in handles:
            handle.remove()
    return Tokenwise(model, order[-1]).train(model.training) if order and vector is not None else None
