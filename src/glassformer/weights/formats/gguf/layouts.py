"""Memory layouts of GGUF files that differ from ours."""

from dataclasses import dataclass

from torch import Tensor

from glassformer.weights.convert import Shape, Transform


@dataclass(frozen=True)
class Interleaved(Transform):
    """Rows of a head in the order in which llama.cpp rotates the architecture `llama`: pairs are neighbours.

    Ours are a pair if they are rows i and i + K/2 of a head; in the file, rows 2i and 2i + 1 are.
    """

    heads: int

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [theirs.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0].unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class PlusOne(Transform):
    """The weights of Gemma's norms: ours are w, and the file has 1 + w."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [theirs.float() - 1]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0].float() + 1


PLUS_ONE = PlusOne()


@dataclass(frozen=True)
class Vector(Transform):
    """A vector: ours is a matrix of one row."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [theirs[None]]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0][0]

    def shape(self, ours: list[Shape]) -> Shape:
        return ours[0][1:]


VECTOR = Vector()


@dataclass(frozen=True)
class ByHead(Transform):
    """A matrix as one for each head; `transposed`: each of them transposed."""

    heads: int
    transposed: bool = False

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [(theirs.transpose(1, 2) if self.transposed else theirs).reshape(shapes[0])]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        heads = ours[0].unflatten(0, (self.heads, -1))
        return heads.transpose(1, 2) if self.transposed else heads

    def shape(self, ours: list[Shape]) -> Shape:
        rows, columns = ours[0]
        width = rows // self.heads
        return (self.heads, columns, width) if self.transposed else (self.heads, width, columns)
