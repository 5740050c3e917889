"""Shared by the views: the model and the input tokens of a request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.config import ModelConfig
from glassformer.studio.errors import StudioError
from glassformer.studio.models import LoadedModel, ModelStore
from glassformer.studio.schema import TextRequest

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.lens.trace import ForwardArguments

GREEDY_TARGET_TOKENS = 24
"""Tokens that an encoder-decoder generates greedily if the request gives no target."""


@dataclass(frozen=True)
class ModelInputs:
    """A model and its input tokens; for an encoder-decoder, `ids` are the source."""

    loaded: LoadedModel
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
    def trace_arguments(self) -> "ForwardArguments":
        import torch

        from glassformer.lens.trace import ForwardArguments

        return ForwardArguments() if self.target is None else ForwardArguments(target=torch.tensor([self.target]))

    @property
    def token_texts(self) -> list[str]:
        """The text of each position of the residual stream that is shown: the decoder's, if there is one."""
        return [self.loaded.token_text(i) for i in (self.ids if self.target is None else self.target)]


def read_inputs(models: ModelStore, request: TextRequest) -> ModelInputs:
    """Return the model and the input tokens of a request."""
    loaded = models.get(request.model)
    ids = loaded.check_ids(request.ids if request.ids is not None else loaded.encode(request.text or ""))
    return ModelInputs(loaded, ids, target_of(loaded, ids, request.target))


def target_of(loaded: LoadedModel, ids: list[int], target: list[int] | None) -> list[int] | None:
    """Return the decoder's input of an encoder-decoder: as given, or generated greedily. None for other models."""
    from glassformer.model import Seq2Seq

    if not isinstance(loaded.model, Seq2Seq):
        if target is not None:
            raise StudioError(f"{loaded.name} is not an encoder-decoder: leave target out.")
        return None
    if target is not None:
        return loaded.check_ids(target)
    from glassformer.generation import Sampling, generate

    return list(generate(loaded.model, [ids], greedy_target_length(loaded.config), Sampling(0.0))[0])


def greedy_target_length(config: ModelConfig) -> int:
    """Return how many tokens an encoder-decoder generates if the request gives no target."""
    return GREEDY_TARGET_TOKENS if config.max_len is None else min(GREEDY_TARGET_TOKENS, config.max_len - 1)


def top_tokens(loaded: LoadedModel, logits: "Tensor", count: int) -> list[dict[str, Any]]:
    """Return the most likely tokens of one position's logits, with their probabilities."""
    probabilities = logits.double().softmax(-1)
    best = probabilities.topk(min(count, len(probabilities)))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"id": i, "piece": loaded.token_text(i), "p": p, "logit": float(logits[i])} for i, p in rows]
