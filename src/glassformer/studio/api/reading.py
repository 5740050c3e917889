"""What the views share: from a request to a model and the tokens it reads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.config import ModelConfig
from glassformer.studio.errors import StudioError
from glassformer.studio.schema import AboutText
from glassformer.studio.shelf import Loaded, Shelf

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.lens.trace import Given

ANSWER_TOKENS = 24
"""Greedy tokens of an encoder-decoder when the request gives no target."""


@dataclass(frozen=True)
class Reading:
    """A model and its tokens; an encoder-decoder's ids are its source."""

    loaded: Loaded
    ids: list[int]
    target: list[int] | None = None

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokens(self) -> "Tensor":
        import torch

        return torch.tensor([self.ids])

    @property
    def given(self) -> "Given":
        import torch

        from glassformer.lens.trace import Given

        return Given() if self.target is None else Given(target=torch.tensor([self.target]))

    @property
    def words(self) -> list[str]:
        """Words along the stream that is read: the decoder's own."""
        return [self.loaded.say(i) for i in (self.ids if self.target is None else self.target)]


def read(shelf: Shelf, asked: AboutText) -> Reading:
    """The model and tokens of a request; the target of an encoder-decoder is its own answer when none is given."""
    loaded = shelf.get(asked.model)
    ids = loaded.checked(asked.ids if asked.ids is not None else loaded.encode(asked.text or ""))
    return Reading(loaded, ids, target_of(loaded, ids, asked.target))


def target_of(loaded: Loaded, ids: list[int], given: list[int] | None) -> list[int] | None:
    """What the decoder of an encoder-decoder reads: as given, or its own greedy answer; None for one stack."""
    from glassformer.model import Seq2Seq

    if not isinstance(loaded.model, Seq2Seq):
        if given is not None:
            raise StudioError(f"{loaded.name} has one stack and reads ids alone: leave target out.")
        return None
    if given is not None:
        return loaded.checked(given)
    from glassformer.generation import Sampling, generate

    return list(generate(loaded.model, [ids], answer_room(loaded.config), Sampling(0.0))[0])


def answer_room(config: ModelConfig) -> int:
    """How many tokens an encoder-decoder answers when nobody says what it answered."""
    return ANSWER_TOKENS if config.max_len is None else min(ANSWER_TOKENS, config.max_len - 1)


def top_tokens(loaded: Loaded, logits: "Tensor", count: int) -> list[dict[str, Any]]:
    """The likeliest tokens of one row of logits, with their probabilities."""
    chances = logits.double().softmax(-1)
    best = chances.topk(min(count, len(chances)))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"id": i, "piece": loaded.say(i), "p": p, "logit": float(logits[i])} for i, p in rows]
