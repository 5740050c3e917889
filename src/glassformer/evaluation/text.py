"""Texts as token ids, with the byte of the source text at which each token ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import plural
from glassformer.evaluation.score import EvaluationError

Text = str | Sequence[str] | Sequence[int] | np.ndarray | Tensor
"""A text, several documents, or the token ids of a text."""


@dataclass(frozen=True)
class Document:
    """One text: its token ids, and where in the text each token ends."""

    tokens: np.ndarray
    ends: np.ndarray | None
    """Offset in UTF-8 bytes of the end of each token; the last one is the length of the text. None: text not known."""
    text: str | None = None


def read_documents(given: Text, tokenizer: Any) -> tuple[list[Document], list[str]]:
    """Return the documents of a text, of a list of texts, or of token ids, and notes about their tokens."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list | tuple) and given and all(isinstance(text, str) for text in given):
        if tokenizer is None:
            raise EvaluationError("a text needs a tokenizer, and this model has none: pass tokenizer=, or token ids.")
        found = [encode(tokenizer, str(text)) for text in given]
        return found, _notes(found, tokenizer)
    document = _from_ids(given, tokenizer)
    unknown = tokenizer is not None and document.ends is None
    note = "the token ids are not what their own text encodes to, so the bytes of the text are not known"
    return [document], [note] if unknown else []


def encode(tokenizer: Any, text: str) -> Document:
    """Return a text as a document. No special token is added; names of special tokens in the text are recognised."""
    try:
        encoded = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception for what its vocabulary lacks
        raise _cannot_encode(tokenizer, text, error) from None
    return Document(np.asarray(encoded.ids, np.int64), _byte_ends(text, encoded.offsets), text)


def _cannot_encode(tokenizer: Any, text: str, error: Exception) -> EvaluationError:
    for character in dict.fromkeys(text):
        try:
            tokenizer.encode(character, add_special_tokens=False)
        except Exception:
            line = text.count("\n", 0, text.index(character)) + 1
            return EvaluationError(
                f"the text holds {character!r} (U+{ord(character):04X}) in line {line}, which is not one of the "
                f"{tokenizer.get_vocab_size()} tokens of this model: remove it."
            )
    return EvaluationError(f"the tokenizer cannot encode the text: {error}.")


def _byte_ends(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Return byte offsets of the ends of tokens. Tokens that are parts of the same characters share their bytes."""
    if not offsets:
        return np.zeros(0, np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    at = np.concatenate([[0], np.cumsum(sizes)])
    spans = np.asarray(offsets, np.int64)
    ends = at[np.maximum.accumulate(spans[:, 1])]
    fresh = np.append(True, (spans[1:] != spans[:-1]).any(1))
    group = np.cumsum(fresh) - 1
    count = np.bincount(group)
    if int(count.max()) > 1:
        first = np.flatnonzero(fresh)
        begin = np.append(0, ends[first[1:] - 1])[group]
        rank = np.arange(len(ends)) - first[group] + 1
        ends = begin + (ends - begin) * rank // count[group]
    ends[-1] = at[-1]  # what a tokenizer drops at the end of a text belongs to its last token
    return ends


def _from_ids(given: Any, tokenizer: Any) -> Document:
    tokens = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise EvaluationError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} are not one sequence of ids: pass integers (N,)."
        )
    tokens = tokens.astype(np.int64)
    if tokenizer is None or not tokens.size:
        return Document(tokens, None)
    again = encode(tokenizer, tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
    return again if np.array_equal(again.tokens, tokens) else Document(tokens, None)


def _notes(documents: list[Document], tokenizer: Any) -> list[str]:
    """Return sentences about tokens that make the numbers mean something else."""
    ids, counts = np.unique(np.concatenate([document.tokens for document in documents]), return_counts=True)
    held = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    unknown = getattr(tokenizer.model, "unk_token", None)
    unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
    added = tokenizer.get_added_tokens_decoder()
    special = sum(held.get(id, 0) for id, token in added.items() if token.special and id != unknown_id)
    notes = []
    if special:
        notes.append(f"{plural(special, 'special token')} of the text were read as control tokens, not as text")
    if unknown_id in held:
        lost = plural(held[unknown_id], "token")
        notes.append(f"{lost} of the text are {unknown}, which hides what they were: bits per byte are too low")
    return notes


def check_vocabulary(tokens: np.ndarray, config: ModelConfig) -> None:
    """Refuse token ids that the model does not have."""
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size):
        raise EvaluationError(
            f"token id {int(tokens.max() if tokens.min() >= 0 else tokens.min())} is outside the model's vocabulary of "
            f"{config.vocab_size} ids: pass the tokenizer of this model."
        )


def prefix_token(config: ModelConfig) -> int | None:
    """Return the token after which a text begins: the beginning of text, or else the end of a text; None without."""
    special = config.special
    return special.bos if special.bos is not None else (special.eos[0] if special.eos else None)
