"""The cross-entropy of single tokens under a decoder: the one forward pass that all evaluations use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from glassformer.errors import GlassformerError
from glassformer.model import DecoderLM, Model

TOKENS = 1 << 14
"""Largest number of tokens in one forward pass, if a sequence is not longer."""
LOGITS = 1 << 26
"""Largest number of logits that are computed at a time."""


class EvaluationError(GlassformerError):
    """An evaluation that is not possible with this model, text or file."""


@dataclass(frozen=True)
class Window:
    """A sequence for one forward pass: all tokens but the last are inputs, and the last `scored` tokens are targets."""

    tokens: np.ndarray
    scored: int


@dataclass(frozen=True)
class Scores:
    """The targets of a window."""

    nats: np.ndarray
    """Cross-entropy of each target, in nats (float64)."""
    greedy: np.ndarray
    """Whether each target is the most likely token."""


def decoder_only(model: Model, purpose: str = "evaluate scores next tokens") -> DecoderLM:
    """Return the model, or refuse one that does not predict next tokens."""
    if isinstance(model, DecoderLM):
        return model
    raise EvaluationError(f"{purpose}, which {type(model).__name__} does not predict: pass a decoder-only model.")


def windows(tokens: np.ndarray, context: int, stride: int) -> Iterator[Window]:
    """Yield windows of `context` inputs that slide by `stride`. Every token but the first is a target exactly once.

    A window scores the tokens that no earlier window scored. The last window is moved back, so that it is full too.
    With stride = context these are the disjoint windows of lm-evaluation-harness.
    """
    context = min(context, len(tokens) - 1)
    last, scored = len(tokens) - 1 - context, 0
    start = 0
    while scored < len(tokens) - 1:
        start = min(start, last)
        yield Window(tokens[start : start + context + 1], start + context - scored)
        scored, start = start + context, start + stride


@torch.no_grad()
def score(model: DecoderLM, given: Sequence[Window]) -> list[Scores]:
    """Return the scores of windows, in their order. Neither the batch nor the order changes them beyond rounding.

    Windows of similar lengths run together, padded at their ends: a position attends to earlier ones only, so padding
    does not change its logits. The softmax is computed in float32 whatever the dtype of the model.
    """
    order = sorted(range(len(given)), key=lambda i: -len(given[i].tokens))
    found: dict[int, Scores] = {}
    was_training = model.training
    model.eval()
    try:
        while order:
            rows = max(1, TOKENS // len(given[order[0]].tokens))
            batch, order = order[:rows], order[rows:]
            found.update(zip(batch, _score_batch(model, [given[i] for i in batch]), strict=True))
    finally:
        model.train(was_training)
    return [found[i] for i in range(len(given))]


def _score_batch(model: DecoderLM, batch: list[Window]) -> list[Scores]:
    longest = max(len(window.tokens) for window in batch) - 1
    inputs = torch.zeros(len(batch), longest, dtype=torch.long)
    chosen = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        n = len(window.tokens) - 1
        inputs[row, :n] = torch.from_numpy(window.tokens[:-1].astype(np.int64))
        chosen[row, n - window.scored : n] = True
    targets = torch.cat([torch.from_numpy(w.tokens[len(w.tokens) - w.scored :].astype(np.int64)) for w in batch])
    hidden = model.encode(inputs.to(model.device))[chosen.to(model.device)]
    targets = targets.to(model.device)
    step = max(1, LOGITS // model.config.vocab_size)
    nats, greedy = [], []
    for rows, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        logits = model.logits(rows[None])[0].float()
        nats.append(F.cross_entropy(logits, wanted, reduction="none").double().cpu())
        greedy.append((logits.argmax(-1) == wanted).cpu())
    sizes = np.cumsum([window.scored for window in batch])[:-1]
    parts = (np.split(torch.cat(values).numpy(), sizes) for values in (nats, greedy))
    return [Scores(*both) for both in zip(*parts, strict=True)]


def check_finite(nats: np.ndarray) -> None:
    """Refuse results that are NaN or infinite: every mean of them would be so too."""
    wrong = int((~np.isfinite(nats)).sum())
    if wrong:
        raise EvaluationError(
            f"the cross-entropy of {wrong:,} of {len(nats):,} tokens is NaN or infinite: check the weights with "
            "`glass doctor`, or use precision float32."
        )
