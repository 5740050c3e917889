"""Validation of a model's inputs, once, at the public methods of the three models."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.model.cache import Cache
from glassformer.shapes import Bool

if TYPE_CHECKING:
    from glassformer.model.stack import Stack
    from glassformer.model.transformer import Embed

Mask = Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None


def check_inputs(
    embed: "Embed",
    stack: "Stack",
    tokens: Any,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    cache: Cache | None = None,
) -> None:
    """Refuse inputs that the model cannot compute with, in one sentence each."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        given = f"dtype {tokens.dtype}" if isinstance(tokens, Tensor) else f"type {type(tokens).__name__}"
        raise ValueError(f"tokens are of {given}: pass a tensor of whole numbers, such as torch.tensor([[1, 2]]).")
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] == 0:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: pass (batch, length), neither of them 0.")
    if mask is not None:
        _check_mask(tokens, mask)
    _check_ids(tokens, embed.tokens.num_embeddings, "token", "vocabulary")
    if segments is not None:
        if embed.segments is None:
            raise ValueError("segments were given to a model without segment embeddings: leave them out.")
        _check_ids(segments, embed.segments.num_embeddings, "segment", "segments")
    if stack.max_position is not None and not torch.compiler.is_compiling():
        _check_positions(stack.max_position, tokens, mask, positions, cache)


def _check_mask(tokens: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}: it must be boolean, True = real token (use mask.bool()).")
    if mask.dim() == 2 and mask.shape != tokens.shape:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(tokens.shape)}: "
            "it marks which of the new tokens are real."
        )


def _check_ids(ids: Tensor, size: int, what: str, where: str) -> None:
    """Check the range on a CPU only: elsewhere it would wait for the device, which reports an error itself."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"{what} id {bad} is outside the {where} of {size} (0 to {size - 1}).")


def _check_positions(
    limit: int, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None
) -> None:
    """Refuse positions that a learned table does not have."""
    first, new = 0, tokens.shape[1]
    if positions is not None:
        first, last = int(positions.min()), int(positions.max())
    elif mask is not None and mask.dim() == 2:
        start = cache.next_position() if cache is not None else 0
        last = int((start + mask.sum(1, keepdim=True) - 1).max())
    elif cache is not None and cache.positions is not None:
        last = int(cache.next_position().max()) + new - 1
    else:  # known without waiting for a device, also while a CUDA graph is captured
        last = new - 1 + (0 if cache is None else cache.length)
    if first < 0 or last >= limit:
        raise ValueError(
            f"position {first if first < 0 else last} is outside a learned table of {limit} positions "
            f"(0 to {limit - 1}): shorten the sequence, or use a model with a longer context."
        )
