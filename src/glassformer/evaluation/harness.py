"""An adapter for lm-evaluation-harness (lm_eval): its tasks on models of this package.

Importing this module registers the model `glassformer` and needs the extra `eval`. `glass eval MODEL --tasks FILE.yaml`
runs local task files, and `python -m glassformer.evaluation` is the command line of lm_eval with this model.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import lm_eval.models  # noqa: F401  first: it lists lm_eval's own models, which a later registration would hide
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from glassformer.evaluation.load import open_model
from glassformer.evaluation.questions import score_pairs
from glassformer.evaluation.score import EvaluationError, decoder_only, score, windows
from glassformer.generation import Sampling, stream
from glassformer.model import Model
from glassformer.weights.tensors import read_json
from glassformer.weights.tokenizer.ends import token_text

NAME = "glassformer"
LENGTH = 2048
"""Context of a model without max_len, as in lm_eval."""
NEW_TOKENS = 256
"""Tokens that are generated unless a task says otherwise, as in lm_eval."""
ROWS = 16
"""Prompts that are continued at a time."""


@register_model(NAME)
class GlassformerLM(TemplateLM):
    """A decoder of this package as a model of lm_eval; the results are those of its `hf` model."""

    def __init__(
        self,
        pretrained: str | Model,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        peft: str | None = None,
    ) -> None:
        """`pretrained` is what `gf.load` takes, or a model; `peft` is the folder of an adapter, as in lm_eval's `hf`.

        lm_eval passes batch sizes, which have no effect here.
        """
        super().__init__()
        if isinstance(pretrained, str):
            # the command line of lm_eval asks for cuda:0 by default, also where there is no GPU
            place = "cpu" if str(device).startswith("cpu") else "auto"
            pretrained, found = open_model(pretrained, dtype, place, peft)
            tokenizer = found if tokenizer is None else tokenizer
        self.model = decoder_only(pretrained, "the tasks of lm_eval score next tokens")
        if tokenizer is None:
            raise EvaluationError("the tasks of lm_eval are texts, and this model has no tokenizer: put it there.")
        self.encoder = tokenizer
        self.max_length = max_length or self.model.config.max_len or LENGTH
        self._device = self.model.device
        self._bos, self._eos = _special_ids(self.model, tokenizer)

    @property
    def eot_token_id(self) -> int | None:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context: beginning of text, or else end of text."""
        found = self._bos if self._bos is not None else self._eos
        if found is None:
            raise EvaluationError(
                "this task scores texts without a context, and the model has no beginning-of-text or end-of-text token "
                "to precede them: use a task with contexts."
            )
        return found

    @property
    def tokenizer_name(self) -> str:
        origin: Any = getattr(self.model, "origin", None)
        return NAME if origin is None else str(origin.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids. By default the tokenizer adds its own special tokens, unless the text begins with one."""
        if add_special_tokens is None:
            first = self._bos if self._bos is not None else self._eos
            name = None if first is None else self.encoder.decode([first], skip_special_tokens=False)
            add_special_tokens = not (name and string.startswith(name))
        return list(self.encoder.encode(string, add_special_tokens=add_special_tokens).ids)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _texts, before, after in requests]
        scores = score_pairs(self.model, pairs, self.max_length)
        for (texts, *_ids), answer in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in disjoint windows."""
        given, owners = [], []
        for number, request in enumerate(requests):
            tokens = np.array([self.prefix_token_id, *self.tok_encode(request.args[0])])
            for window in windows(tokens, self.max_length, self.max_length):
                given.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, found in zip(owners, score(self.model, given), strict=True):
            totals[owner] -= float(found.nats.sum())
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until one of the stop texts of the task, or the end of text."""
        found: dict[int, str] = {}
        order = sorted(range(len(requests)), key=lambda i: str(requests[i].args[1]))
        for _, same in groupby(order, key=lambda i: str(requests[i].args[1])):
            numbers = list(same)
            for first in range(0, len(numbers), ROWS):
                batch = numbers[first : first + ROWS]
                texts = self._continue([requests[i].args[0] for i in batch], requests[batch[0]].args[1])
                found.update(zip(batch, texts, strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[number])
        return [found[number] for number in range(len(requests))]

    def _continue(self, contexts: Sequence[str], given: dict[str, Any]) -> Iterator[str]:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, NEW_TOKENS))
        stops, limit = [text for text in settings.pop("until") if text], settings.pop("max_gen_toks")
        if self._eos is not None:
            stops.append(self.encoder.decode([self._eos], skip_special_tokens=False))
        if limit >= self.max_length:
            raise EvaluationError(
                f"max_gen_toks={limit} of the task leaves no room for a prompt in a context of {self.max_length}: set "
                "fewer."
            )
        prompts = [self.tok_encode(text)[-(self.max_length - limit) :] for text in contexts]
        new: list[list[int]] = [[] for _ in prompts]
        steps = stream(self.model, prompts, limit, sampling=_sampling(settings), stop=self._stop())
        for step in steps:
            for tokens, token in zip(new, step, strict=True):
                if token is not None:
                    tokens.append(token)
            if stops and all(any(stop in self._text(tokens) for stop in stops) for tokens in new):
                steps.close()
                break
        return (postprocess_generated_text(self._text(tokens), stops, None) for tokens in new)

    def _stop(self) -> list[int]:
        """The ends of text: those of the config and of the tokenizer."""
        return sorted({*self.model.config.special.eos, *([] if self._eos is None else [self._eos])})

    def _text(self, tokens: list[int]) -> str:
        return str(self.encoder.decode(tokens)) if tokens else ""


def _special_ids(model: Model, tokenizer: Any) -> tuple[int | None, int | None]:
    """Return beginning and end of text: those of tokenizer_config.json, as lm_eval takes them, or of the config."""
    origin: Any = getattr(model, "origin", None)
    file = None if origin is None else origin.path / "tokenizer_config.json"
    if file is not None and file.is_file():
        config = read_json(file)
        names = (token_text(config.get("bos_token")), token_text(config.get("eos_token")))
        bos, eos = (None if name is None else tokenizer.token_to_id(name) for name in names)
        if bos is not None or eos is not None:
            return bos, eos
    special = model.config.special
    return special.bos, special.eos[0] if special.eos else None


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return the sampling of a task. What this package does not have is refused by name."""
    sample, temperature = settings.pop("do_sample", False), float(settings.pop("temperature", 0.0))
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    known = {name: settings.pop(name) for name in names if name in settings}
    if settings:
        raise EvaluationError(
            f"generation_kwargs of the task have {next(iter(settings))!r}, which is not supported: leave it out."
        )
    if not sample:  # greedy decoding, which only the penalty changes
        return Sampling(0.0, repetition_penalty=known.get("repetition_penalty", 1.0))
    return Sampling(temperature or 1.0, **known)
