"""Feeding a model: prompts in, the logits after each row's last token out, one step at a time.

Rows of unequal length are padded on the left, so that every row's next token lands in the same column; the mask and the
position count keep padding invisible. An encoder-decoder reads the prompt with its encoder (padded on the right) and
starts its decoder from `special.start`.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.generation.tokenizer import encode_text, tokenizer_of
from glassformer.model import DecoderLM, EncoderLM, Model, Seq2Seq
from glassformer.model.cache import CacheKind
from glassformer.shapes import Bool, Float, Int

Prompts = Sequence[Sequence[int]] | Tensor | str | Sequence[str]


def is_text(prompts: object) -> bool:
    """Return whether prompts are a text, or a list of texts."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(one, str) for one in prompts)


def read_prompts(model: Model, prompts: Prompts) -> list[list[int]]:
    """Return prompts as lists of token ids, checked against the vocabulary. Texts are encoded by the model's tokenizer.

    Everything that is not a prompt is refused in one sentence.
    """
    if isinstance(model, EncoderLM):
        raise ValueError("an encoder-only model predicts masked tokens, not the next token: it cannot generate text.")
    if is_text(prompts):
        return _encoded(model, [prompts] if isinstance(prompts, str) else list(prompts))  # type: ignore[arg-type]
    listed: Any = _listed(prompts) if hasattr(prompts, "tolist") else prompts
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise ValueError(f"prompts are of type {type(prompts).__name__}: pass a list of lists of token ids.")
    if not listed:
        raise ValueError("there is no prompt: pass at least one list of token ids.")
    return [_row(number, row, model.config.vocab_size) for number, row in enumerate(listed)]


def _encoded(model: Model, texts: list[str]) -> list[list[int]]:
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise ValueError(
            f"the prompt {shorten(texts[0])!r} is text, and the model carries no tokenizer (it was not loaded from a "
            "folder with a tokenizer.json): pass token ids, such as [tokenizer.encode(text).ids]."
        )
    rows = [encode_text(tokenizer, text) for text in texts]
    return [_row(number, row, model.config.vocab_size) for number, row in enumerate(rows)]


def shorten(text: str) -> str:
    """Return at most 40 characters of a text, for a message."""
    return text if len(text) <= 40 else f"{text[:39]}…"


def _listed(prompts: Any) -> Any:
    """A tensor or array as lists."""
    kind = str(prompts.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise ValueError(f"prompts are of dtype {kind}: token ids are whole numbers, convert them to int64.")
    if len(prompts.shape) != 2:
        raise ValueError(
            f"prompts have shape {tuple(prompts.shape)}: it must be (batch, length); use prompts[None] for one."
        )
    return prompts.tolist()


def _row(number: int, row: Any, vocabulary: int) -> list[int]:
    """One prompt, each of its ids checked."""
    if isinstance(row, int):
        raise ValueError("prompts are lists of token ids, one list per sequence: wrap a single prompt as [prompt].")
    if isinstance(row, str | bytes) or not (isinstance(row, Sequence) or hasattr(row, "tolist")):
        raise ValueError(f"prompt {number} is {row!r}: pass a list of token ids, or texts only.")
    if hasattr(row, "shape") and len(row.shape) != 1:
        raise ValueError(f"prompt {number} has shape {tuple(row.shape)}: it must be one-dimensional.")
    tokens = row.tolist() if hasattr(row, "tolist") else list(row)
    if not tokens:
        raise ValueError(f"prompt {number} is empty: a model needs at least one token to continue.")
    found = []
    for token in tokens:
        try:
            found.append(-1 if isinstance(token, bool) else operator.index(token))
        except TypeError:
            raise ValueError(
                f"prompt {number} contains {token!r}, of type {type(token).__name__}: token ids are whole numbers."
            ) from None
        if not 0 <= found[-1] < vocabulary:
            raise ValueError(f"prompt {number} has token id {token}: ids go from 0 to {vocabulary - 1}.")
    return found


def check_length(model: Model, rows: list[list[int]], max_new_tokens: int) -> None:
    """Refuse what the context cannot hold, before any work is done."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be a whole number of at least 1.")
    limit = model.config.max_len
    if limit is None:
        return
    longest = max(map(len, rows))
    if isinstance(model, Seq2Seq):
        if longest > limit:
            raise ValueError(f"a source of {longest} tokens is longer than the context of {limit}: shorten it.")
        longest = 1
    elif longest >= limit:
        raise ValueError(
            f"a prompt of {longest} tokens fills the context of {limit}: shorten it to {limit - 1} or less."
        )
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the context of {limit}: "
            f"ask for {limit - longest} new tokens or fewer."
        )


def ends_with(row: list[int], stops: list[list[int]]) -> bool:
    """Whether what was generated ends in one of the stop sequences."""
    return any(row[-len(s) :] == s for s in stops)


@contextmanager
def evaluating(*models: Model, parts: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """No dropout and no gradients, and every module as it was afterwards; `parts`: all modules, where they are known.

    Asked and set one by one: `train()` walks and writes all of them, which takes longer than a small model's step, and
    finding them takes a tenth of a millisecond.
    """
    found = [module for model in models for module in model.modules()] if parts is None else parts
    training = [module for module in found if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Torch computes in this thread alone, where that is wanted: while the compiled kernels decode.

    After an operation that torch shares out, its threads spin for milliseconds, on the cores where the kernels' own
    would compute the next token: drawing from 50,257 probabilities by two threads halves the speed of an int8 GPT-2.
    """
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pad(
    rows: list[list[int]], side: str, device: torch.device
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Rows as one tensor with its mask of real tokens; None when all have the same length."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, at] = torch.tensor(row)
        real[i, at] = True
    return tokens.to(device), None if bool(real.all()) else real.to(device)


class Feed:
    """The running state of one generation. `start` reads the prompts, `step` one more token per row."""

    def __init__(
        self,
        model: DecoderLM | Seq2Seq,
        rows: list[list[int]],
        max_new_tokens: int,
        cache: CacheKind | None,
        chunk: int | None,
    ):
        self.model, self.chunk = model, chunk
        self.memory: Tensor | None = None
        self.source_mask: Tensor | None = None
        if isinstance(model, Seq2Seq):
            source, self.source_mask = pad(rows, "right", model.device)
            start = model.config.special.start
            if start is None:
                raise ValueError("config.special.start is not set: an encoder-decoder needs a first decoder token.")
            self.memory = model.encode(source, self.source_mask)
            self.rows = [[start] for _ in rows]
        else:
            self.rows = rows
        self.tokens, self.real = pad(self.rows, "left", model.device)
        capacity = self.tokens.shape[1] + max_new_tokens
        self.cache = None if cache is None else model.new_cache(cache, capacity=capacity)

    def start(self) -> Float[Tensor, "B V"]:
        """Logits after the prompts. In chunks, so that a long prompt needs little memory at a time, when asked to."""
        width = self.tokens.shape[1]
        size = self.chunk if self.chunk and self.cache is not None else width
        logits = self.tokens.new_empty(0)
        for first in range(0, width, size):
            at = slice(first, first + size)
            logits = self._forward(self.tokens[:, at], None if self.real is None else self.real[:, at])
        return logits

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits after one more token per row: one row of work with a cache, everything again without."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        if self.cache is not None:
            return self._forward(tokens[:, None], None)
        if self.real is not None:
            self.real = torch.cat([self.real, torch.ones_like(tokens, dtype=torch.bool)[:, None]], dim=1)
        return self._forward(self.tokens, self.real)

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        """Row i goes on from the present row parents[i]; there may be more rows afterwards than before."""
        self.tokens = self.tokens.index_select(0, parents)
        for name in ("real", "memory", "source_mask"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held.index_select(0, parents))
        if self.cache is not None:
            self.cache.reorder(parents)

    def _forward(self, tokens: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B V"]:
        """Logits of the last column only: the head is not applied to the rest of a prompt."""
        model = self.model
        if isinstance(model, Seq2Seq):
            hidden = model.decode_hidden(tokens, self.memory, self.source_mask, real, cache=self.cache)
        else:
            hidden = model.encode(tokens, real, cache=self.cache)
        return model.logits(hidden[:, -1:])[:, 0]
