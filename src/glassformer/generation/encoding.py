"""Hidden states of texts of unequal length by an encoder: compiled kernels or captured graphs, or torch in batches."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from glassformer.config.choices import Engine, Precision
from glassformer.errors import GlassformerError
from glassformer.generation.engine import (
    TORCH_PRECISIONS,
    Call,
    EngineError,
    dtype_name,
    in_precision,
    kernels_are_disabled,
)
from glassformer.generation.request import encode_text, is_text, tokenizer_of
from glassformer.generation.state import evaluating, one_thread, pad
from glassformer.model import EncoderLM
from glassformer.model.transformer import modules_of
from glassformer.shapes import Float

if TYPE_CHECKING:
    from glassformer.kernels.encode import EncodeKernel

Ids = list[list[int]]
"""Token ids, or segment ids, of each text."""
BATCH = 16384
"""Tokens of a padded batch, unless one text has more: a long list of texts must not fill the memory."""
PADDING = 2048
"""Tokens of padding for shorter texts in a batch: computing more of them takes longer than launching another batch."""


def encode(
    model: EncoderLM,
    texts: str | Sequence[str] | Sequence[Sequence[int]],
    segments: Sequence[Sequence[int]] | None = None,
    engine: Engine = "auto",
    precision: Precision = "auto",
) -> list[Float[Tensor, "T D"]]:
    """Return the hidden states (tokens, width) of each text, after the last block.

    `texts` are lists of token ids, one text, or a list of texts if the model was loaded with a tokenizer. They may have
    unequal lengths: each gets what it would get alone. `segments` are the segment ids of each token.

    `engine="native"` means, on a CPU, compiled kernels that compute real tokens only, in the precisions of decoding. On
    a GPU it means CUDA graphs of padded batches in the stored dtype: the second time that a batch of some size occurs,
    it is captured. "torch" launches each operation of a padded batch. "auto" uses "native" if it supports the model
    and, on a CPU, a compiler is there, unless the environment variable GLASSFORMER_NATIVE is 0. Batches have texts of
    similar lengths and at most 16,384 tokens.

    The default precision is float32 in the kernels of a CPU and else the stored dtype. "bfloat16" for other weights is
    autocast with "torch", which "auto" uses if "native" cannot.

    >>> states = gf.encode(gf.build(gf.presets.bert_base(n_layers=1)), [[101, 2054, 102], [101, 102]])
    >>> [tuple(one.shape) for one in states]
    [(3, 768), (2, 768)]
    """
    if not isinstance(model, EncoderLM):
        raise ValueError(
            f"{type(model).__name__} is not an encoder: gf.encode needs one, such as gf.load returns for BERT."
        )
    _check_choices(engine, precision)
    if is_text(texts):
        tokenizer, given = tokenizer_of(model), [texts] if isinstance(texts, str) else list(texts)
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: pass lists of token ids, or load it from a folder with one.")
        texts = [encode_text(tokenizer, text) for text in given]  # type: ignore[arg-type]
    ids: Ids = [list(text) for text in texts]  # type: ignore[arg-type]
    if not ids or not all(ids):
        raise ValueError("there is no text, or an empty one: give at least one token for each text.")
    kinds = None if segments is None else [list(one) for one in segments]
    _check_ids(model, ids, kinds)
    if not _is_for_torch(engine, precision):
        try:
            return _by_kernels(model, ids, kinds, precision)
        except GlassformerError as error:
            if engine == "native" or precision not in ("auto", *TORCH_PRECISIONS):
                raise EngineError(str(error)) from None
    elif precision not in ("auto", *TORCH_PRECISIONS):
        raise EngineError(f"precision={precision!r} needs the compiled kernels: use engine='native' or 'auto'.")
    return _by_torch(model, ids, kinds, precision)


def _is_for_torch(engine: str, precision: str) -> bool:
    """Return whether torch computes, whatever the kernels support: by the engine, or by the environment for "auto"."""
    needs_kernels = precision not in ("auto", *TORCH_PRECISIONS)
    return engine == "torch" or (engine == "auto" and not needs_kernels and kernels_are_disabled())


def _check_choices(engine: str, precision: str) -> None:
    for name, value, known in (("engine", engine, get_args(Engine)), ("precision", precision, get_args(Precision))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known: use {', '.join(map(repr, known))}.")


def _check_ids(model: EncoderLM, ids: Ids, segments: Ids | None) -> None:
    _check_range(ids, model.config.vocab_size, "token", "vocabulary")
    limit, longest = model.encoder.max_position, max(map(len, ids))
    if limit is not None and longest > limit:
        raise ValueError(f"a text has {longest} tokens and the model has positions for {limit}: shorten it.")
    if segments is None:
        return
    if [len(one) for one in segments] != [len(text) for text in ids]:
        raise ValueError("segments must have one id for each token of each text.")
    if model.embed.segments is None:
        raise ValueError("segments were given to a model without segment embeddings: leave them out.")
    _check_range(segments, model.embed.segments.num_embeddings, "segment", "segments")


def _check_range(ids: Ids, size: int, what: str, where: str) -> None:
    outside = next((one for row in ids for one in row if not 0 <= one < size), None)
    if outside is not None:
        raise ValueError(f"{what} id {outside} is outside the {where} of {size} (0 to {size - 1}).")


def _by_kernels(model: EncoderLM, ids: Ids, segments: Ids | None, precision: Precision) -> list[Tensor]:
    """Return the states by compiled kernels or captured graphs; raise an error with the reason if none can be used."""
    modules = modules_of(model.embed, model.encoder)
    kernel, used = _kernel(model, precision)
    encoder, padded = kernel.make(model, modules, used), kernel.padded
    exact = torch.autocast(model.device.type, enabled=False)
    with evaluating(parts=modules), exact, one_thread(kernel.owns_threads):
        if padded is None:
            return encoder.encode(ids, segments)
        most = model.encoder.max_position
        return in_batches(encoder.encode, ids, segments, lambda rows, length: padded(rows, length, most))


def _kernel(model: EncoderLM, precision: Precision) -> "tuple[EncodeKernel, str]":
    """Return the kernel for a model on its device, and the dtype or format in which it computes."""
    remedy = "engine='torch'" if precision in ("auto", *TORCH_PRECISIONS) else "precision='auto'"
    try:
        from glassformer.kernels.encode import choose_encoder
    except ImportError:
        raise EngineError(f"the compiled kernels are not installed: use {remedy}.") from None
    exact = dtype_name(model.dtype) if model.device.type == "cuda" else "float32"
    used = exact if precision == "auto" else precision
    kernel, reason = choose_encoder(Call(model.config, model.dtype, model.device, precision=used))
    if kernel is None:
        raise EngineError(f"{reason}: use {remedy}.")
    return kernel, used


def _by_torch(model: EncoderLM, ids: Ids, segments: Ids | None, precision: Precision) -> list[Tensor]:
    casts = precision == "bfloat16" and model.dtype is not torch.bfloat16
    if precision not in ("auto", "bfloat16"):
        model = in_precision(model, getattr(torch, precision))

    def compute(ids: Ids, segments: Ids | None) -> list[Tensor]:
        tokens, mask = pad(ids, "right", model.device)
        kinds = None if segments is None else pad(segments, "right", model.device)[0]
        states = model.encode(tokens, mask, segments=kinds)
        return [row[: len(text)] for row, text in zip(states, ids, strict=True)]

    with evaluating(model), torch.autocast(model.device.type, torch.bfloat16, enabled=casts):
        return in_batches(compute, ids, segments)


def in_batches(
    compute: Callable[[Ids, Ids | None], list[Tensor]],
    ids: Ids,
    segments: Ids | None,
    padded: Callable[[int, int], tuple[int, int]] | None = None,
) -> list[Tensor]:
    """Compute the states of texts in batches, and return them in the order of the texts."""
    states: list[Any] = [None] * len(ids)
    for batch in batches([len(text) for text in ids], padded):
        kinds = None if segments is None else [segments[i] for i in batch]
        for i, found in zip(batch, compute([ids[i] for i in batch], kinds), strict=True):
            states[i] = found
    return states


def batches(lengths: list[int], padded: Callable[[int, int], tuple[int, int]] | None = None) -> list[list[int]]:
    """Divide texts of these lengths into batches, the longest first; return the indices of each batch in order.

    A batch has at most BATCH tokens after padding, of which at most PADDING pad shorter texts, or it is one text.
    `padded` returns to how many rows and tokens a batch of some texts, of which the longest has some tokens, is padded.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    found: list[list[int]] = []
    first, real = 0, 0
    for end, i in enumerate(order):
        count, longest = end - first + 1, lengths[order[first]]
        rows, length = (count, longest) if padded is None else padded(count, longest)
        padding = count * longest - real - lengths[i]
        if end > first and (rows * length > BATCH or padding > PADDING):
            found.append(sorted(order[first:end]))
            first, real = end, 0
        real += lengths[i]
    return [*found, sorted(order[first:])]
