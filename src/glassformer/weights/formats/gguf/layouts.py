"""How tensors of a Hugging Face folder are laid out in a GGUF file, in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Shape = tuple[int, ...]


class Layout(Protocol):
    """A change of layout and its inverse. `data` is config.json, which has the numbers of heads."""

    def to_gguf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor: ...

    def to_hf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor: ...

    def hf_shape(self, shape: Shape) -> Shape: ...

    @property
    def copies(self) -> bool:
        """True if `to_hf` returns a new tensor, False if it returns a view."""


class Same:
    """The same layout in both."""

    copies = False

    def to_gguf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor

    def to_hf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor

    def hf_shape(self, shape: Shape) -> Shape:
        return shape


class Transposed(Same):
    """GPT-2's matrices: (in, out) in the folder, (out, in) in the file. A bias does not change."""

    def to_gguf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor.t() if tensor.dim() == 2 else tensor

    def to_hf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor.t() if tensor.dim() == 2 else tensor

    def hf_shape(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclass(frozen=True)
class Interleaved(Same):
    """Rows of a head in the order in which llama.cpp rotates the architecture `llama`: pairs are neighbours.

    In the folder, rows i and i + K/2 of a head are a pair; in the file, rows 2i and 2i + 1 are.
    """

    heads: str
    """The key of config.json with the number of heads."""
    copies = True

    def to_gguf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor.unflatten(0, (_heads(data, self.heads), 2, -1)).transpose(1, 2).flatten(0, 2)

    def to_hf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor.unflatten(0, (_heads(data, self.heads), -1, 2)).transpose(1, 2).flatten(0, 2)


class PlusOne(Same):
    """The weights of Gemma's norms: the folder has w, and the file has 1 + w."""

    copies = True

    def to_gguf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor.float() + 1

    def to_hf(self, tensor: Tensor, data: Mapping[str, Any]) -> Tensor:
        return tensor.float() - 1


def _heads(data: Mapping[str, Any], key: str) -> int:
    return data.get(key) or data["num_attention_heads"]


SAME, TRANSPOSED, PLUS_ONE = Same(), Transposed(), PlusOne()
