"""Tokens that a config forces or suppresses in generated text: `special.forced_bos`, `forced_eos` and `suppressed`.

Translation and summary models are trained with them: mBART's first token is the language, and Marian must never produce
its padding token. The rules are those of `transformers`, which applies them to logits when it samples, and to
log-probabilities, without normalizing them again, in beam search.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from glassformer.config import Special
from glassformer.shapes import Float, Int


@dataclass(frozen=True)
class Constraints:
    """What the next token may be, by the number of tokens that were generated before it."""

    special: Special
    max_new_tokens: int

    def forced(self, step: int) -> int | None:
        """Return the only token that may follow `step` new tokens; None if there is a choice."""
        if step == self.max_new_tokens - 1 and self.special.forced_eos is not None:
            return self.special.forced_eos
        return self.special.forced_bos if step == 0 else None

    def apply(self, scores: Float[Tensor, "B V"], step: int) -> Float[Tensor, "B V"]:
        """Return the scores with -inf for tokens that may not come next. A forced token gets 0."""
        token = self.forced(step)
        if token is not None:
            scores = torch.full_like(scores, float("-inf"))
            scores.select(1, token).fill_(0.0)
        elif self.special.suppressed:
            scores = scores.index_fill(1, _on_device(tuple(self.special.suppressed), scores.device), float("-inf"))
        return scores


@cache
def _on_device(ids: tuple[int, ...], device: torch.device) -> Int[Tensor, "N"]:
    """Return ids as a tensor. Copied for each token, they would make the host wait for a GPU."""
    return torch.tensor(ids, device=device)
