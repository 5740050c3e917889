"""The input, the options and the result of a view."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassformer.errors import listing, plural
from glassformer.lens.figure import Figure
from glassformer.lens.sites import LensError
from glassformer.lens.trace import ForwardArguments
from glassformer.model import Model


@dataclass(frozen=True)
class Subject:
    """A model and the text it runs on."""

    name: str
    model: Model
    ids: Sequence[int] = ()
    say: Callable[[int], str] = str
    """Returns the text of a token id."""
    target: Sequence[int] | None = None
    """The decoder's tokens of an encoder-decoder; `ids` are then the source."""

    @property
    def words(self) -> list[str]:
        """The texts of the tokens of the decoder (or of the only stack)."""
        return [self.say(i) for i in (self.ids if self.target is None else self.target)]

    @property
    def given(self) -> ForwardArguments:
        return ForwardArguments() if self.target is None else ForwardArguments(target=torch.tensor([list(self.target)]))

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([list(self.ids)])


@dataclass(frozen=True)
class Choice:
    """The user's options for a view."""

    show: str | None = None
    """Which figure of the view; None is the first."""
    layer: int | None = None
    head: int | None = None
    position: int = -1
    answer: int | None = None
    wrong: int | None = None
    against: Sequence[int] | None = None
    """Token ids of the other text, for patching."""
    seed: int = 0


@dataclass(frozen=True)
class View:
    """Numbers as plain lists and a function that draws them."""

    numbers: dict[str, Any]
    draw: Callable[[], Figure] = field(repr=False)


def pick(kind: str, choice: Choice, *known: str) -> str:
    """Return the chosen figure, or the first."""
    if choice.show is None:
        return known[0]
    if choice.show not in known:
        raise LensError(f"{kind} cannot show {choice.show!r}: it has {listing(list(known))}.")
    return choice.show


def index(what: str, value: int | None, size: int) -> int | None:
    if value is not None and not 0 <= value < size:
        raise LensError(f"{what} {value} does not exist in this model: its {what}s are 0 to {size - 1}.")
    return value


def position_index(subject: Subject, position: int) -> int:
    """Convert a position counted from either end into an index from the start."""
    length = len(subject.words)
    if not -length <= position < length:
        raise LensError(
            f"position {position} is outside a text of {plural(length, 'token')}: use {-length} to {length - 1}."
        )
    return position % length
