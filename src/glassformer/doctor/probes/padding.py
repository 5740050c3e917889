"""Padded batches: how they are built, and how a padded prompt is fed through a cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.subject import Subject
from glassformer.shapes import Bool, Int


@dataclass
class Padded:
    """A batch in which row b has `amounts[b]` padding positions on one side."""

    tokens: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    """True = real."""
    rows: list[Int[Tensor, "1 n"]]
    """The real tokens of each row, alone."""
    side: str

    @property
    def positions(self) -> Int[Tensor, "B T"]:
        """Real tokens counted from 0; padding positions get 0."""
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)

    def real(self, values: Tensor, row: int) -> Tensor:
        """What a (B,T,...) tensor holds at the real positions of a row: (1,n,...)."""
        return values[row][self.mask[row]][None]


def padded(
    subject: Subject, length: int, amounts: list[int], side: str, fill: int | None = None, seed: int = 21
) -> Padded:
    """Rows of random tokens, padded with `fill` (None: other random tokens, different at each position)."""
    tokens = subject.tokens(len(amounts), length, seed)
    junk = subject.other(tokens, seed + 5) if fill is None else torch.full_like(tokens, fill)
    column = torch.arange(length, device=tokens.device)[None]
    n = torch.tensor([length - a for a in amounts], device=tokens.device)[:, None]
    mask = column >= length - n if side == "left" else column < n
    # the same words whatever the amount: rows start at their first token
    full = subject.tokens(len(amounts), length, seed)
    rows = [full[b : b + 1, : length - a] for b, a in enumerate(amounts)]
    out = junk.clone()
    for b, row in enumerate(rows):
        out[b][mask[b]] = row[0]
    return Padded(out, mask, rows, side)


class NanToZero(TorchDispatchMode):
    """Each NaN that an operation returns becomes 0: what a model computes if queries without a visible key read 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for one in output if isinstance(output, tuple | list) else (output,):
            if isinstance(one, Tensor) and one.is_floating_point() and bool(one.isnan().any()):
                one.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        return output


def amounts(subject: Subject, *usual: int) -> list[int]:
    """Padding positions per row: the usual ones, or fewer for a model that takes short inputs only."""
    most = max(1, subject.limit // 4)
    return list(usual) if subject.limit > max(usual) + 7 else [round(n * most / max(usual)) for n in usual]


def pad_fill(subject: Subject) -> int:
    """The model's own padding id, else 0."""
    return subject.pad if subject.pad is not None else 0


def feed_padded(
    isolated: Subject, batch: Padded, more: Int[Tensor, "B n"], convention: str, explicit: bool
) -> tuple[Tensor, Any]:
    """A padded prompt, then single steps through a cache: logits (B,n,V) of the steps.

    Who remembers the padding differs: the cache (`none`, `new`: a mask of the new tokens) or the caller (`whole`: a
    mask of everything so far, Hugging Face's way).
    """
    given: dict[str, Any] = {"positions": batch.positions} if explicit else {}
    _, cache = isolated.call(
        batch.tokens, mask=batch.mask, cache=isolated.new_cache(len(batch.tokens)), with_cache=True, **given
    )
    return step_padded(isolated, cache, batch.mask, more, convention, explicit)


def step_padded(
    isolated: Subject, cache: Any, mask: Bool[Tensor, "B T"], more: Int[Tensor, "B n"], convention: str, explicit: bool
) -> tuple[Tensor, Any]:
    if cache is None:
        raise Unsupported("a call with a cache gives no cache back")
    counts, out = mask.long().sum(1, keepdim=True), []
    for i in range(more.shape[1]):
        one = more[:, i : i + 1]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        given: dict[str, Any] = {"positions": counts + i} if explicit else {}
        if convention != "none":
            given["mask"] = mask if convention == "whole" else mask[:, -1:]
        logits, cache = isolated.call(one, cache=cache, with_cache=True, **given)
        out.append(logits)
    return torch.cat(out, dim=1), cache


def conventions(subject: Subject) -> tuple[str, ...]:
    """Ways to pass the padding mask to a step, most likely first."""
    return ("whole",) if subject.interface.library else ("none", "new", "whole")
