"""Accuracy on multiple choice questions and cloze rows by log-likelihood, with the conventions of
lm-evaluation-harness: the choice that the model finds most likely after the context is its answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.evaluation.rows import Row
from glassformer.evaluation.score import EvaluationError, Window, check_finite, decoder_only, score
from glassformer.evaluation.statistics import Spread, grouped
from glassformer.evaluation.text import check_vocabulary, prefix_token
from glassformer.generation.request import tokenizer_of
from glassformer.model import DecoderLM, Model

DELIMITER = " "
"""What stands between a context and its continuation."""

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""


@dataclass(frozen=True)
class Metric:
    """The mean of one value per row."""

    values: np.ndarray
    spread: Spread

    @property
    def value(self) -> float:
        return float(self.values.mean())

    def to_dict(self) -> dict[str, Any]:
        interval = self.spread.interval(self.value)
        return {"value": self.value, "standard_error": self.spread.standard_error, "interval": interval}


@dataclass(frozen=True, repr=False)
class Answers:
    """What a model answered."""

    kind: str
    """`questions` or `clozes`."""
    metrics: dict[str, Metric]
    """Names as in lm-evaluation-harness. `acc`: the most likely choice is correct; `acc_norm`: the most likely per
    character; `acc_bytes`: per byte. Cloze rows: `acc`, the target is what greedy decoding gives, and `nats`, the
    cross-entropy of the target."""
    groups: list[str] | None
    log_likelihoods: list[list[float]]
    """Of each choice of each row."""

    @property
    def count(self) -> int:
        return len(self.log_likelihoods)

    @property
    def chance(self) -> float | None:
        """Accuracy of a uniformly random answer; None for cloze rows."""
        if self.kind == "clozes":
            return None
        return float(np.mean([1 / len(choices) for choices in self.log_likelihoods]))

    @property
    def perplexity(self) -> float | None:
        """exp of the mean cross-entropy of whole targets, for cloze rows."""
        return math.exp(self.metrics["nats"].value) if "nats" in self.metrics else None

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: metric.to_dict() for name, metric in self.metrics.items()}
        return {
            "kind": self.kind,
            "rows": self.count,
            "groups": None if self.groups is None else len(set(self.groups)),
            "chance": self.chance,
            "perplexity": self.perplexity,
            **numbers,
        }

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {metric.value:.4f}" for name, metric in self.metrics.items())
        return f"<Answers: {shown}, {self.count} {self.kind}>"


def answer(model: Model, rows: Sequence[Row], tokenizer: Any = None) -> Answers:
    """Return the accuracy of a decoder on questions or on cloze rows."""
    decoder = decoder_only(model, "log-likelihoods are of next tokens")
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise EvaluationError("questions are texts and need a tokenizer, and this model has none: pass tokenizer=.")
    pairs = []
    for row in rows:
        for choice in row.choices:
            try:
                pairs.append(encode_pair(tokenizer, row.context, DELIMITER + choice, prefix_token(model.config)))
            except EvaluationError as error:
                raise EvaluationError(f"row {row.line}: {error}") from None
    scores = score_pairs(decoder, pairs)
    check_finite(np.array([one[0] for one in scores]))
    return _answers(rows, scores)


def encode_pair(tokenizer: Any, context: str, continuation: str, prefix: int | None) -> Pair:
    """Return the token ids of a context and of what follows it.

    Spaces at the end of the context move to the continuation. Both are encoded together, and the continuation is what
    follows the tokens of the context alone. An empty context becomes the prefix token.
    """
    if not context:
        ids = _ids(tokenizer, continuation, False)
        if ids and ids[0] == prefix:
            return _not_empty(ids[:1], ids[1:], continuation)
        if prefix is None:
            raise EvaluationError(
                "the context is empty, and the model has no beginning-of-text or end-of-text token to precede the "
                "continuation: give a context."
            )
        return _not_empty([prefix], ids, continuation)
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
        if not context:
            return encode_pair(tokenizer, "", continuation, prefix)
    before = _ids(tokenizer, context, True)
    return _not_empty(before, _ids(tokenizer, context + continuation, True)[len(before) :], continuation)


def _not_empty(before: list[int], after: list[int], continuation: str) -> Pair:
    if not after:
        raise EvaluationError(f"the continuation {continuation!r} has no token of its own: give a longer one.")
    return before, after


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    except Exception as error:  # the library raises plain Exception for what its vocabulary lacks
        raise EvaluationError(f"the tokenizer cannot encode {text[:40]!r}: {error}.") from None


def score_pairs(model: DecoderLM, pairs: Sequence[Pair], max_length: int | None = None) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation, and whether greedy decoding gives it.

    Of a context that is too long, the beginning is dropped: at most `max_length` tokens (default: the model's max_len)
    are inputs. A continuation must fit as a whole.
    """
    limit = model.config.max_len if max_length is None else max_length
    given = []
    for context, continuation in pairs:
        if limit is not None and len(continuation) > limit:
            raise EvaluationError(
                f"a continuation of {len(continuation)} tokens is longer than the model's context of {limit}: shorten "
                "it, or use a model with a longer context."
            )
        tokens = np.asarray([*context, *continuation], np.int64)
        check_vocabulary(tokens, model.config)
        tokens = tokens if limit is None else tokens[-(limit + 1) :]
        given.append(Window(tokens, len(continuation)))
    return [(-float(one.nats.sum()), bool(one.greedy.all())) for one in score(model, given)]


def _answers(rows: Sequence[Row], scores: list[tuple[float, bool]]) -> Answers:
    groups = None if rows[0].group is None else [str(row.group) for row in rows]
    parts, at = list[list[tuple[float, bool]]](), 0
    for row in rows:
        parts.append(scores[at : at + len(row.choices)])
        at += len(row.choices)
    likelihoods = [[value for value, _ in part] for part in parts]
    if all(len(row.choices) == 1 for row in rows):
        values = {
            "acc": [float(part[0][1]) for part in parts],
            "nats": [-part[0][0] for part in parts],
        }
        kind = "clozes"
    else:
        values = {
            "acc": [_correct(row, held, [1] * len(held)) for row, held in zip(rows, likelihoods, strict=True)],
            "acc_norm": [
                _correct(row, held, [len(choice) for choice in row.choices])
                for row, held in zip(rows, likelihoods, strict=True)
            ],
            "acc_bytes": [
                _correct(row, held, [len(choice.encode()) for choice in row.choices])
                for row, held in zip(rows, likelihoods, strict=True)
            ],
        }
        kind = "questions"
    metrics = {name: Metric(np.array(held), grouped(np.array(held), groups)) for name, held in values.items()}
    return Answers(kind, metrics, groups, likelihoods)


def _correct(row: Row, likelihoods: list[float], lengths: list[int]) -> float:
    best = int(np.argmax(np.array(likelihoods) / np.array(lengths)))
    return float(best == row.answer)


def paired_answers(first: Answers, second: Answers) -> dict[str, Metric]:
    """Return the difference of each metric on the same rows, first minus second, with its paired standard error."""
    found = {}
    for name, metric in first.metrics.items():
        deltas = metric.values - second.metrics[name].values
        found[name] = Metric(deltas, grouped(deltas, first.groups))
    return found
