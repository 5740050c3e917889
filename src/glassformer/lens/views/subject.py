"""What a view is of, what it was narrowed to, and what it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassformer.config.errors import listing
from glassformer.errors import plural
from glassformer.lens.figure import Figure
from glassformer.lens.sites import LensError
from glassformer.lens.trace import Given
from glassformer.model import Model


@dataclass(frozen=True)
class Subject:
    """A model and the text it is looked at with."""

    name: str
    model: Model
    ids: Sequence[int] = ()
    say: Callable[[int], str] = str
    """The word of a token id."""
    target: Sequence[int] | None = None
    """What the decoder of an encoder-decoder reads; `ids` are then its source."""

    @property
    def words(self) -> list[str]:
        """Words along the text whose stream is read: the decoder's own."""
        return [self.say(i) for i in (self.ids if self.target is None else self.target)]

    @property
    def given(self) -> Given:
        return Given() if self.target is None else Given(target=torch.tensor([list(self.target)]))

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([list(self.ids)])


@dataclass(frozen=True)
class Choice:
    """What a user narrowed the view to."""

    show: str | None = None
    """Which of a kind's pictures; None is its first."""
    layer: int | None = None
    head: int | None = None
    position: int = -1
    answer: int | None = None
    wrong: int | None = None
    against: Sequence[int] | None = None
    """Ids of the other text, for patching."""
    seed: int = 0


@dataclass(frozen=True)
class View:
    """Numbers as plain lists, and how to draw them."""

    numbers: dict[str, Any]
    draw: Callable[[], Figure] = field(repr=False)


def pick(kind: str, choice: Choice, *known: str) -> str:
    """The picture chosen, or the first of its kind."""
    if choice.show is None:
        return known[0]
    if choice.show not in known:
        raise LensError(f"{kind} cannot show {choice.show!r}: it has {listing(list(known))}.")
    return choice.show


def index(what: str, value: int | None, size: int) -> int | None:
    if value is not None and not 0 <= value < size:
        raise LensError(f"{what} {value} does not exist in this model: its {what}s are 0 to {size - 1}.")
    return value


def place_of(subject: Subject, position: int) -> int:
    """An index into the text from either end, as one from the start."""
    length = len(subject.words)
    if not -length <= position < length:
        raise LensError(
            f"position {position} is outside a text of {plural(length, 'token')}: use {-length} to {length - 1}."
        )
    return position % length
