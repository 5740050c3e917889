"""What two models are asked: the same tokens at several lengths, padded on either side, and through a cache.

Answers are taken in the models' own precision and in float64. There two ways to write one model agree to 1e-12, and a
difference that stays is no rounding. Weights of unequal precision are first rounded to the coarser one: otherwise the
rounding of the weights themselves would look like a difference.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from glassformer.anatomy.record import Widened, elementary
from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.measure import many
from glassformer.doctor.subject.subject import Subject
from glassformer.shapes import Bool, Float, Int

LENGTHS = (5, 13, 37, 131)
"""Unequal to usual numbers of heads, so that an axis is never taken for another; the last past two powers of two."""
ROWS = 2
LARGE = 30_000_000
"""Parameters above which the longest input is left out."""


@dataclass
class Case:
    """One question."""

    name: str
    tokens: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"] | None = None
    source: Int[Tensor, "B N"] | None = None
    source_mask: Bool[Tensor, "B N"] | None = None
    prompt: int | None = None
    """With a cache: this many tokens at once, then the others one by one."""

    def ask(self, subject: Subject) -> Float[Tensor, "B T V"]:
        """Logits at every position; padding holds whatever the model gives there."""
        here = subject.device
        given: dict[str, Any] = {}
        if self.source is not None:
            given["source"] = self.source.to(here)
        if self.source_mask is not None:
            given["source_mask"] = self.source_mask.to(here)
        tokens = self.tokens.to(here)
        if self.mask is not None:
            given["mask"] = self.mask.to(here)
            left = not bool(self.mask[:, 0].all())
            if left and subject.interface.positions_from_caller:
                given["positions"] = (given["mask"].long().cumsum(1) - 1).clamp(min=0)
        if self.prompt is None:
            return subject.logits(tokens, **given)
        logits, cache = subject.call(
            tokens[:, : self.prompt], cache=subject.new_cache(len(tokens)), with_cache=True, **given
        )
        pieces = [logits]
        for position in range(self.prompt, tokens.shape[1]):
            logits, cache = subject.call(tokens[:, position : position + 1], cache=cache, with_cache=True, **given)
            pieces.append(logits)
        return torch.cat(pieces, 1)

    @property
    def real(self) -> Bool[Tensor, "B T"] | None:
        return self.mask


def cases_for(a: Subject, b: Subject, tokens: Int[Tensor, "B T"] | None, vocab_size: int) -> list[Case]:
    """Every question that both can be asked."""
    seq2seq = a.kind == "seq2seq"
    source = draw(a, b, 11, vocab_size, seed=77) if seq2seq else None
    if tokens is not None:
        return [Case("tokens given", tokens, source=source if seq2seq else None)]
    limit = min(a.limit, b.limit)
    large = max(a.n_parameters, b.n_parameters) > LARGE
    lengths = [t for t in LENGTHS if t <= limit and not (large and t > 40)] or [limit]
    found = [Case(many(t, "token"), draw(a, b, t, vocab_size, seed=t), source=source) for t in lengths]
    width = min(13, limit)
    text = draw(a, b, width, vocab_size, seed=1)
    if source is None and a.interface.mask and b.interface.mask and width > 4:
        for side in ("right", "left"):
            if side == "left" and not all(_counts_real_tokens(s) for s in (a, b)):
                continue
            real = torch.ones(ROWS, width, dtype=torch.bool)
            real[1, -4:] = False
            found.append(Case(f"padded on the {side}", text, real if side == "right" else real.flip(1)))
    if source is not None and a.interface.source_mask and b.interface.source_mask:
        real = torch.ones(source.shape, dtype=torch.bool)
        real[1, -3:] = False
        found.append(Case("source padded", text, source=source, source_mask=real))
    if source is None and a.kind == "decoder" and a.has_cache and b.has_cache and width > 6:
        found.append(Case("through a cache, token by token", text, prompt=5))
    return found


def draw(a: Subject, b: Subject, length: int, vocab_size: int, seed: int) -> Int[Tensor, "B T"]:
    """Random ids that are special to neither."""
    special = a.special_ids() | b.special_ids()
    ids = torch.tensor([i for i in range(min(vocab_size, 50_000)) if i not in special] or [0])
    return ids[torch.randint(0, len(ids), (ROWS, length), generator=torch.Generator().manual_seed(seed))]


def _counts_real_tokens(subject: Subject) -> bool:
    """Whether its positions can be made to skip padding on the left."""
    if type(subject.model).__module__.startswith("glassformer."):
        return True
    return subject.interface.positions_from_caller


def is_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod")


@contextlib.contextmanager
def prepared(subject: Subject, coarse: torch.dtype, exact: bool) -> Iterator[Subject]:
    """A copy in eval mode; with `exact` rounded to `coarse` and then in float64."""
    if not exact:
        with quiet(), subject.isolated() as isolated:
            yield isolated
        return
    with quiet(), subject.isolated(dtype=coarse if subject.dtype != coarse else None) as isolated:
        if isolated.module is not None:
            isolated.module.to(torch.float64)
        yield replace(isolated, model=isolated.model)


def answers(
    subject: Subject, cases: list[Case], coarse: torch.dtype, exact: bool
) -> dict[str, Float[Tensor, "B T V"] | str]:
    """Logits of every case, or why there are none."""
    found: dict[str, Tensor | str] = {}
    with prepared(subject, coarse, exact) as isolated:
        for case in cases:
            try:
                # a compiled model must be asked as it is: under a dispatch mode it would not run compiled
                if exact and not is_compiled(subject.model):
                    with elementary(exact), Widened():
                        logits = case.ask(isolated)
                else:
                    with torch.no_grad():
                        logits = case.ask(isolated)
                found[case.name] = logits.detach().double().cpu()
            except Exception as error:
                found[case.name] = " ".join(str(error).split())[:160] or type(error).__name__
    return found
