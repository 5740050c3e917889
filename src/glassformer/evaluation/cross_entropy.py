"""`gf.evaluate`: the cross-entropy of a text under a decoder, with a standard error that respects correlation."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from glassformer.config import ModelConfig
from glassformer.errors import plural
from glassformer.evaluation.score import EvaluationError, check_finite, decoder_only, score, windows
from glassformer.evaluation.statistics import Spread, spread
from glassformer.evaluation.text import Document, Text, check_vocabulary, prefix_token, read_documents
from glassformer.generation.request import tokenizer_of
from glassformer.model import DecoderLM, Model

CONTEXT = 512
"""Tokens per window for a model without max_len."""


@dataclass(frozen=True)
class ContextLoss:
    """Mean cross-entropy of the targets that have between `fewest` and `most` tokens before them in their window."""

    fewest: int
    most: int
    nats_per_token: float
    tokens: int


@dataclass(frozen=True)
class Scored:
    """The scored tokens of one document."""

    document: Document
    nats: np.ndarray
    """Cross-entropy of each scored token."""
    left_out: int
    """Number of tokens at the beginning that are not scored: 0 or 1."""

    @property
    def sizes(self) -> np.ndarray | None:
        """UTF-8 bytes of each scored token; None if the text is not known."""
        ends = self.document.ends
        return None if ends is None else np.diff(ends, prepend=0)[self.left_out :]


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation:
    """How well a model predicts a text."""

    nats_per_token: float
    """Mean cross-entropy of the scored tokens, in nats."""
    bits_per_byte: float | None
    """Cross-entropy in bits, divided by the UTF-8 bytes of the scored text. It compares models with different
    tokenizers. None if the text is not known."""
    tokens: int
    """Number of scored tokens."""
    n_bytes: int | None
    """UTF-8 bytes of the scored text."""
    documents: int
    """Number of documents with a scored token."""
    context: int
    """Largest number of tokens per window."""
    stride: int
    """Tokens by which a window is moved: every scored token sees at least context - stride earlier ones, if the
    document has them."""
    windows: int
    """Number of windows."""
    prefix: int | None
    """The token id that precedes each document, so that its first token is scored too; None: it is not scored."""
    spread: Spread
    """The standard error of nats_per_token, and the blocks or documents that it was estimated from."""
    bits_spread: Spread | None
    """The same of bits_per_byte."""
    by_context: tuple[ContextLoss, ...]
    """Cross-entropy by the number of earlier tokens in the window."""
    notes: tuple[str, ...] = ()
    scored: tuple[Scored, ...] = field(default=(), repr=False)
    """The cross-entropy of every token."""

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token)."""
        return math.exp(self.nats_per_token)

    @property
    def standard_error(self) -> float | None:
        """Standard error of nats_per_token; None if the text is too short for one."""
        return self.spread.standard_error

    @property
    def nats(self) -> np.ndarray:
        """Cross-entropy of every scored token, document after document."""
        return np.concatenate([one.nats for one in self.scored])

    def first_token(self) -> str:
        """Return how the first token of a document is treated, as a phrase."""
        if self.prefix is None:
            return "the first token of a document is not scored: nothing precedes it"
        return f"the first token of a document is scored after token {self.prefix}"

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values, without those of single tokens."""
        interval = self.spread.interval(self.nats_per_token)
        bits_error = None if self.bits_spread is None else self.bits_spread.standard_error
        return {
            "nats_per_token": self.nats_per_token,
            "standard_error": self.standard_error,
            "interval": interval,
            "perplexity": self.perplexity,
            "perplexity_interval": None if interval is None else tuple(map(math.exp, interval)),
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_error": bits_error,
            "tokens": self.tokens,
            "bytes": self.n_bytes,
            "documents": self.documents,
            "context": self.context,
            "stride": self.stride,
            "windows": self.windows,
            "prefix": self.prefix,
            "first_token": self.first_token(),
            "error_unit": self.spread.unit,
            "error_units": self.spread.count,
            "block": self.spread.block,
            "by_context": [vars(part) for part in self.by_context],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"<Evaluation: {self.nats_per_token:.4f}{error} nats per token{bits}, {plural(self.tokens, 'token')}>"


def evaluate(
    model: Model,
    text_or_tokens: Text,
    tokenizer: Any = None,
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix: bool = True,
) -> Evaluation:
    """Return the cross-entropy of a text under a decoder, with every token predicted exactly once.

    `text_or_tokens` is a text, a list of texts (documents, which do not see each other), or token ids. Windows of
    `context` tokens (default: the model's max_len, 512 without one) slide over it by `stride` tokens (default: half the
    context), and each window scores the tokens that no earlier window scored. `stride=context` is the evaluation of
    training, and of lm-evaluation-harness.

    With `prefix`, the first token of a document is scored after the model's beginning-of-text token, or else its end of
    text. A model that has neither, or `prefix=False`, leaves the first token out. `tokenizer` is a
    `tokenizers.Tokenizer`; the default is that of the folder from which the model was loaded.

    >>> round(gf.evaluate(gf.load("bard"), "ROMEO:\\nWhat light is this?").nats_per_token, 2)
    0.85
    """
    decoder = decoder_only(model)
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    documents, notes = read_documents(text_or_tokens, tokenizer)
    before = prefix_token(model.config) if prefix else None
    for document in documents:
        check_vocabulary(document.tokens, model.config)
    longest = max(len(document.tokens) for document in documents) - (before is None)
    if longest < 1:
        why = "it is empty" if before is not None else "the first token has no context"
        raise EvaluationError(f"the text has no token to score, because {why}: give a longer text.")
    context, stride = _window(model.config, longest, context, stride)
    found, by_context, n_windows = _score(decoder, documents, before, context, stride)
    return _summary(found, by_context, context, stride, n_windows, before, notes)


def _window(config: ModelConfig, longest: int, context: int | None, stride: int | None) -> tuple[int, int]:
    """Return context and stride. The context is not longer than the longest document."""
    limit = config.max_len
    if context is not None and (context < 1 or (limit is not None and context > limit)):
        rule = "at least 1" if limit is None else f"between 1 and the model's max_len, {limit}"
        raise EvaluationError(f"context={context} must be {rule}.")
    context = min(context or limit or CONTEXT, longest)
    stride = max(1, context // 2) if stride is None else stride
    if stride < 1:
        raise EvaluationError(f"stride={stride} must be at least 1 and at most the context, {context}.")
    return context, min(stride, context)


def _score(
    model: DecoderLM, documents: list[Document], before: int | None, context: int, stride: int
) -> tuple[list[Scored], tuple[ContextLoss, ...], int]:
    given, owners, left_out = [], [], []
    for number, document in enumerate(documents):
        # ids that already begin with the prefix do not get a second one
        doubled = before is not None and len(document.tokens) > 1 and int(document.tokens[0]) == before
        tokens = document.tokens if before is None or doubled else np.append(before, document.tokens)
        left_out.append(len(document.tokens) - len(tokens) + 1)
        for window in windows(tokens, context, stride):
            given.append(window)
            owners.append(number)
    scores = score(model, given)
    nats: list[list[np.ndarray]] = [[] for _ in documents]
    for owner, one in zip(owners, scores, strict=True):
        nats[owner].append(one.nats)
    seen = np.concatenate([np.arange(len(w.tokens) - w.scored, len(w.tokens)) for w in given])
    by_context = _by_context(seen, np.concatenate([one.nats for one in scores]))
    joined = [np.concatenate([np.zeros(0), *parts]) for parts in nats]
    found = [Scored(*parts) for parts in zip(documents, joined, left_out, strict=True)]
    return found, by_context, len(given)


def _by_context(seen: np.ndarray, nats: np.ndarray) -> tuple[ContextLoss, ...]:
    """Return the mean over targets with 1, 2 to 3, 4 to 7, ... tokens before them."""
    found = []
    for power in range(int(seen.max()).bit_length()):
        inside = (seen >= 1 << power) & (seen < 2 << power)
        if inside.any():
            most = min((2 << power) - 1, int(seen.max()))
            found.append(ContextLoss(1 << power, most, float(nats[inside].mean()), int(inside.sum())))
    return tuple(found)


def _summary(
    found: list[Scored],
    by_context: tuple[ContextLoss, ...],
    context: int,
    stride: int,
    n_windows: int,
    before: int | None,
    notes: list[str],
) -> Evaluation:
    nats = np.concatenate([one.nats for one in found])
    check_finite(nats)
    lengths = [len(one.nats) for one in found]
    total, bits, n_bytes, bits_spread = float(nats.sum()), None, None, None
    sizes = [one.sizes for one in found]
    if all(size is not None for size in sizes):
        weights = np.concatenate(sizes).astype(float)  # type: ignore[arg-type]
        n_bytes = int(weights.sum())
        if n_bytes:
            bits = total / math.log(2) / n_bytes
            bits_spread = spread(nats / math.log(2), weights, lengths)
    return Evaluation(
        nats_per_token=total / len(nats),
        bits_per_byte=bits,
        tokens=len(nats),
        n_bytes=n_bytes,
        documents=sum(length > 0 for length in lengths),
        context=context,
        stride=stride,
        windows=n_windows,
        prefix=before,
        spread=spread(nats, np.ones(len(nats)), lengths),
        bits_spread=bits_spread,
        by_context=by_context,
        notes=tuple(notes),
        scored=tuple(found),
    )
