"""Longer tables for a model: rows for added tokens, and rows for positions beyond those it was trained with."""

from collections.abc import Mapping

import torch
from torch import Tensor

from glassformer.config import Learned, ModelConfig, QueryKeyPosition

TOKEN_TABLES = ("embed.tokens.weight", "head.weight", "head.bias")


def extend_state(
    state: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig, known: int, seed: int
) -> dict[str, Tensor]:
    """Return the state dict of `old` with the tables of `new`. `known` ids were trained; later rows are filled anew."""
    out = dict(state)
    generator = torch.Generator().manual_seed(seed)
    if known < new.vocab_size and (known < old.vocab_size or new.vocab_size > old.vocab_size):
        for name in TOKEN_TABLES:
            if name in out:
                out[name] = _new_tokens(out[name], known, new.vocab_size, generator)
    if new.max_len != old.max_len and (position := _table(old)) is not None:
        for name in [name for name in out if name.endswith(".position.weight")]:
            out[name] = _longer(out[name], position.offset, (new.max_len or 0) + position.offset)
    return out


def _table(config: ModelConfig) -> Learned | None:
    position = config.position.vectors if isinstance(config.position, QueryKeyPosition) else config.position
    return position if isinstance(position, Learned) else None


def _new_tokens(table: Tensor, known: int, rows: int, generator: torch.Generator) -> Tensor:
    """Keep the first `known` rows; each further one is their mean plus noise of their standard deviation.

    A bias has the mean alone: noise would make some new tokens more likely than others.
    """
    kept = table[:known].float()
    fresh = kept.mean(0).expand(rows - known, *table.shape[1:])
    if table.dim() == 2:
        noise = torch.empty(fresh.shape).normal_(generator=generator)
        fresh = fresh + noise.to(table.device) * kept.std(0)
    return torch.cat([table[:known], fresh.to(table.dtype)])


def _longer(table: Tensor, offset: int, rows: int) -> Tensor:
    """Append rows to a table of positions: position p >= n of m is interpolated at p (n - 1) / (m - 1)."""
    trained, n, m = table[offset:].float(), len(table) - offset, rows - offset
    at = torch.arange(n, m, dtype=torch.float64) * (n - 1) / (m - 1)
    low = at.floor().long().clamp(max=n - 1)
    share = (at - low).float()[:, None].to(table.device)
    high = (low + 1).clamp(max=n - 1)
    return torch.cat([table, (trained[low] * (1 - share) + trained[high] * share).to(table.dtype)])
