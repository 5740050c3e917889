"""Scores of attention heads: of their patterns on repeated random tokens and on text, and of their weights.

A pattern score is the mean attention to a target over the queries that can see the target. A query that can see only
one key is not counted. If no query counts, the score is NaN in a tensor and None in a table, never 0.

    previous_token   A[t, t-1]
    current_token    A[t, t]
    first_token      A[t, 0]
    duplicate_token  Σ_s A[t, s] over the other positions with the same token, x_s = x_t (in a decoder: earlier ones)
    induction        Σ_s A[t, s+1] over the earlier positions s with the same token, that is, attention to what followed
                     it. On a block of distinct tokens and its copy, s+1 is the position after the first occurrence
                     (Elhage et al. 2021)
    prefix_matching  the same on a block repeated four times, where a head may attend after any copy (Olsson et al.
    2022)

The length and position of the block are random: on one fixed sequence, a head that always attends n positions back
could not be distinguished from an induction head. A high score is sufficient for continuing a repetition but not
necessary: other algorithms do it too.

Scores of the weights (`copying`, `copying_top`) are in `glassformer.lens.copying`.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.errors import nearest
from glassformer.lens.copying import copying_score, copying_top
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace
from glassformer.model import DecoderLM, EncoderLM, Model, masks
from glassformer.shapes import Bool, Float, Int

Visible = Bool[Tensor, "*v T T"]
Scores = Float[Tensor, "*r"]
"""(H,), or a number for a single (T,T) pattern."""


def previous_token_score(pattern: Float[Tensor, "*h T T"], visible: Visible | None = None) -> Scores:
    """Return the mean attention to the previous token."""
    size = pattern.shape[-1]
    return _mean_on(pattern, torch.ones(size, size).tril(-1).triu(-1).bool(), visible)


def current_token_score(pattern: Float[Tensor, "*h T T"], visible: Visible | None = None) -> Scores:
    """Return the mean attention of a token to itself."""
    return _mean_on(pattern, torch.eye(pattern.shape[-1], dtype=torch.bool), visible)


def first_token_score(pattern: Float[Tensor, "*h T T"], visible: Visible | None = None) -> Scores:
    """Return the mean attention to the first token of the sequence (the first that any query can see)."""
    seen = _shaped(pattern, visible)[1]
    first = torch.nn.functional.one_hot(seen.any(-2).int().argmax(-1), seen.shape[-1]).bool()
    return _mean_on(pattern, first[:, None].expand_as(seen), visible)


def duplicate_token_score(
    pattern: Float[Tensor, "*h T T"], tokens: Int[Tensor, "*b T"], visible: Visible | None = None
) -> Scores:
    """Return the mean attention to the other positions with the same token."""
    same = tokens[..., :, None] == tokens[..., None, :]
    return _mean_on(pattern, same & ~torch.eye(pattern.shape[-1], dtype=torch.bool, device=same.device), visible)


def induction_score(
    pattern: Float[Tensor, "*h T T"], tokens: Int[Tensor, "*b T"], visible: Visible | None = None
) -> Scores:
    """Return the mean attention to the positions after earlier occurrences of the same token.

    The pattern is (T,T), (H,T,T) or (B,H,T,T), the tokens (T,) or (B,T); the result is a number or (H,). `visible` is
    True where a query can see a key, (T,T) or (B,T,T); the default is the causal mask.

    TransformerLens' `detect_head(..., "induction_head", error_measure="mul")` has the same targets but divides by all T
    queries. This score counts only the queries that have a target, so tokens that are not repeated do not lower it.
    """
    earlier = (tokens[..., :, None] == tokens[..., None, :]).tril(-1)
    after = torch.nn.functional.pad(earlier, (1, 0))[..., :-1]
    return _mean_on(pattern, after, visible)


def attention_entropy(pattern: Float[Tensor, "*h T T"], visible: Visible | None = None) -> tuple[Scores, Scores]:
    """Return the mean entropy -Σ_s A ln A in nats, and the mean of its ratio to ln(visible keys), the maximum."""
    heads, seen = _shaped(pattern, visible)
    counted = seen.sum(-1) > 1
    nats = torch.special.entr(heads).sum(-1)  # (B, H, T)
    most = seen.sum(-1).clamp(min=2).to(heads.dtype).log()[:, None]
    return _average(nats, counted, pattern), _average(nats / most, counted, pattern)


def attention_distance(pattern: Float[Tensor, "*h T T"], visible: Visible | None = None) -> Scores:
    """Return the mean of Σ_s A[t,s] |t - s|, in tokens."""
    heads, seen = _shaped(pattern, visible)
    index = torch.arange(pattern.shape[-1], dtype=heads.dtype, device=heads.device)
    away = (index[:, None] - index[None, :]).abs()
    return _average((heads * away).sum(-1), seen.sum(-1) > 1, pattern)


def _mean_on(pattern: Tensor, targets: Tensor, visible: Tensor | None) -> Tensor:
    """Return the attention to the visible targets, averaged over queries with a target and more than one key."""
    heads, seen = _shaped(pattern, visible)
    targets = targets.to(heads.device)
    targets = (targets if targets.dim() == 3 else targets[None]) & seen  # (B, T, T)
    on = (heads * targets[:, None]).sum(-1)
    return _average(on, targets.any(-1) & (seen.sum(-1) > 1), pattern)


def _shaped(pattern: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the pattern as (B,H,T,T) in float64 and the visibility as (1 or B,T,T)."""
    heads = pattern.detach().to("cpu", torch.float64)
    heads = heads[(None,) * (4 - heads.dim())]
    size = heads.shape[-1]
    seen = torch.ones(size, size, dtype=torch.bool).tril() if visible is None else visible.cpu()
    return heads, seen if seen.dim() == 3 else seen[None]


def _average(values: Tensor, counted: Tensor, pattern: Tensor) -> Tensor:
    """Return the mean of (B,H,T) over the counted queries: (H,), or a number for a single pattern; NaN over none."""
    counted = counted.expand(len(values), -1)
    mean = (values * counted[:, None]).sum((0, 2)) / counted.sum()
    return mean[0] if pattern.dim() == 2 else mean


SHORTEST, LONGEST = 10, 40


def repeated_tokens(
    vocab_size: int,
    rows: int = 16,
    length: int = LONGEST,
    copies: int = 2,
    seed: int = 0,
    exclude: Collection[int] = (),
) -> Int[Tensor, "B T"]:
    """Return random sequences: random tokens, a block repeated `copies` times, random tokens.

    All tokens of a sequence are distinct except for the copies. With two copies the block takes 20 % to 45 % of the
    sequence, with more copies proportionally less; its length and position are uniform. `exclude` are ids that never
    occur, such as BOS.
    """
    low, high = max(2, 2 * length // (5 * copies)), max(2, 9 * length // (10 * copies))
    allowed = torch.tensor([v for v in range(vocab_size) if v not in set(exclude)])
    needed = length - (copies - 1) * low
    if rows < 1 or copies < 2 or high * copies > length:
        raise LensError(
            f"rows={rows}, copies={copies}, length={length} leave no room for a repetition: give at least 1 row, "
            f"2 copies and {2 * copies} tokens."
        )
    if len(allowed) < needed:
        raise LensError(
            f"a vocabulary of {len(allowed)} ordinary tokens is too small for {length} positions without accidental "
            f"repetitions, which need {needed}: give a shorter length."
        )
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    made = []
    for _ in range(rows):
        size = draw(low, high)
        start = draw(0, length - copies * size)
        order = allowed[torch.randperm(len(allowed), generator=generator)]
        block, rest = order[:size], order[size : size + length - copies * size]
        made.append(torch.cat([rest[:start], block.repeat(copies), rest[start:]]))
    return torch.stack(made)


@dataclass(frozen=True)
class HeadRow:
    layer: int
    head: int
    scores: dict[str, float | None]
    """Scores by name; None if a score is undefined for this head (the table's notes give the reason)."""


@dataclass(frozen=True)
class HeadTable:
    """One row per head with all scores; `notes` explains the scores that are None."""

    rows: tuple[HeadRow, ...]
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.rows[0].scores)

    def ranked(self, by: str = "induction") -> "HeadTable":
        """Return the same rows sorted by one score, highest first; heads without this score come last."""
        self._check(by)

        def order(row: HeadRow) -> tuple[bool, float]:
            value = row.scores[by]
            return value is None, 0.0 if value is None else -value

        return HeadTable(tuple(sorted(self.rows, key=order)), self.notes)

    def score(self, name: str) -> Float[Tensor, "L H"]:
        """Return one score of all heads as a matrix; None becomes NaN."""
        self._check(name)
        layers, heads = (1 + max(getattr(row, axis) for row in self.rows) for axis in ("layer", "head"))
        grid = torch.full((layers, heads), math.nan, dtype=torch.float64)
        for row in self.rows:
            value = row.scores[name]
            if value is not None:
                grid[row.layer, row.head] = value
        return grid

    def text(self, by: str = "induction", top: int | None = None) -> str:
        """Return aligned columns, highest `by` first; a dash marks an undefined score, explained below the table."""
        titles = ["layer", "head", *(name.replace("_", " ") for name in self.names)]
        cells = [
            [str(row.layer), str(row.head), *("–" if v is None else f"{v:.3f}" for v in row.scores.values())]
            for row in self.ranked(by).rows[:top]
        ]
        words = [title.split(" ") for title in titles]
        deep = max(map(len, words))
        head = [[([""] * (deep - len(w)) + w)[i] for w in words] for i in range(deep)]
        widths = [max(len(line[i]) for line in head + cells) for i in range(len(titles))]
        lines = ["  ".join(f"{x:>{w}}" for x, w in zip(line, widths, strict=True)) for line in head + cells]
        return "\n".join([*lines, *(f"– {name}: {why}" for name, why in self.notes.items())]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values in the table's order."""
        rows = [{"layer": row.layer, "head": row.head, **row.scores} for row in self.rows]
        return {"heads": rows, "notes": dict(self.notes)}

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise LensError(f"{name!r} is not a score of this table.{nearest(name, self.names)}")


def head_table(
    model: Model,
    text: Int[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    *,
    rows: int = 16,
    length: int | None = None,
    seed: int = 0,
    weights: bool = True,
) -> HeadTable:
    """Return every score of every self-attention head of a decoder or an encoder.

    Random sequences have `length` tokens (default: as many as context and vocabulary allow, at most 40), after BOS if
    the model has one. Token ids given as `text` (with `mask`, True at real tokens) add entropy, distance and
    first-token share on them. `weights=False` leaves out the OV circuit, whose V·D² multiplications cost more than the
    rest.
    """
    if not isinstance(model, DecoderLM | EncoderLM):
        raise LensError("head scores are defined for one stack: give a decoder or an encoder, not an encoder-decoder.")
    cfg = model.config
    length = _fitting_length(cfg) if length is None else length
    twice, often = (repeated_inputs(cfg, rows, length, copies, seed) for copies in (2, 4))
    columns = _pattern_columns(model, twice, often)
    if text is not None:
        columns |= _text_columns(model, text, mask)
    if weights:
        columns |= {"copying": _by_layer(copying_score(model)), "copying_top": _by_layer(copying_top(model))}
    table: list[HeadRow] = []
    for layer in range(cfg.n_layers):
        made = {name: column(layer) for name, column in columns.items()}
        for head in range(cfg.n_heads):
            scores = {name: _number(None if s is None else s[head]) for name, s in made.items()}
            table.append(HeadRow(layer, head, scores))
    missing = [name for name in columns if any(row.scores[name] is None for row in table)]
    return HeadTable(tuple(table), {name: _why_missing(cfg, name) for name in missing})


def _by_layer(scores: Tensor | None) -> "Column":
    return lambda layer: None if scores is None else scores[layer]


Column = Callable[[int], Tensor | None]
"""The scores of all heads of a layer, (H,)."""


def _columns(model: Model, tokens: Tensor, mask: Tensor | None = None) -> Callable[..., Column]:
    """Run the model, and return a function that makes the column of a score of the patterns on these tokens."""
    run = trace(model, tokens, sites="blocks.*.attention.pattern", mask=mask)

    def of(score: Callable[..., Tensor], *given: Tensor) -> Column:
        def column(layer: int) -> Tensor:
            seen = visibility(model, layer, tokens.shape[1], mask)
            return score(run[f"blocks.{layer}.attention.pattern"], *given, seen)

        return column

    return of


def _spread_columns(of: Callable[..., Column]) -> dict[str, Column]:
    return {
        "entropy": of(lambda pattern, seen: attention_entropy(pattern, seen)[0]),
        "relative_entropy": of(lambda pattern, seen: attention_entropy(pattern, seen)[1]),
        "distance": of(attention_distance),
    }


def _pattern_columns(model: Model, twice: Tensor, often: Tensor) -> dict[str, Column]:
    causal = isinstance(model, DecoderLM)
    first, second = _columns(model, twice), _columns(model, often)
    return {
        "induction": first(induction_score, twice) if causal else lambda layer: None,
        "prefix_matching": second(induction_score, often) if causal else lambda layer: None,
        "previous_token": first(previous_token_score),
        "duplicate_token": first(duplicate_token_score, twice),
        "current_token": first(current_token_score),
        "first_token": first(first_token_score),
        **_spread_columns(first),
    }


def _text_columns(model: Model, text: Tensor, mask: Tensor | None) -> dict[str, Column]:
    of = _columns(model, text, mask)
    columns = {**_spread_columns(of), "first_token": of(first_token_score)}
    return {f"text_{name}": column for name, column in columns.items()}


def visibility(model: Model, layer: int, size: int, mask: Bool[Tensor, "B T"] | None = None) -> Bool[Tensor, "*v T T"]:
    """Return which keys each query of this layer can see (causality, window, padding). A padding query sees none."""
    index = torch.arange(size)
    seen = masks.causal(index, index) if isinstance(model, DecoderLM) else torch.ones(size, size, dtype=torch.bool)
    width = model.config.window(layer)
    if width is not None:
        seen = seen & masks.window(index, index, width)
    if mask is not None:
        real = mask.cpu()
        seen = seen & real[:, :, None] & real[:, None, :]
    return seen


def _special(cfg: c.ModelConfig) -> set[int]:
    ids = cfg.special
    return {v for v in (ids.bos, ids.pad, ids.start, *ids.eos) if v is not None}


def repeated_inputs(cfg: c.ModelConfig, rows: int, length: int, copies: int = 2, seed: int = 0) -> Int[Tensor, "B T"]:
    """Return `repeated_tokens` of a model's ordinary tokens, after BOS if the model has one."""
    tokens, bos = repeated_tokens(cfg.vocab_size, rows, length, copies, seed, _special(cfg)), cfg.special.bos
    return tokens if bos is None else torch.nn.functional.pad(tokens, (1, 0), value=bos)


def _fitting_length(cfg: c.ModelConfig) -> int:
    """Return the longest sequence, at most LONGEST, that context and vocabulary allow."""
    context = LONGEST if cfg.max_len is None else cfg.max_len - (cfg.special.bos is not None)
    ordinary = cfg.vocab_size - len(_special(cfg))
    for length in range(min(LONGEST, context), SHORTEST - 1, -1):
        if length - max(2, length // 5) <= ordinary:
            return length
    raise LensError(
        f"a context of {context} and {ordinary} ordinary tokens leave no room for a repeated block: head scores need a "
        f"context of at least {SHORTEST} and at least {SHORTEST - 2} tokens."
    )


def _number(value: Tensor | None) -> float | None:
    return None if value is None or math.isnan(float(value)) else float(value)


def _why_missing(cfg: c.ModelConfig, name: str) -> str:
    if name.startswith("copying"):
        return (
            "the path from this attention head to the logits is not linear: the model has no output head, one with "
            "an activation, or the product of the matrices is zero."
        )
    if name in ("induction", "prefix_matching") and isinstance(cfg, c.EncoderConfig):
        return "a token of an encoder sees what follows it, so there is no continuation to look up."
    return "no query can see its target, or more than one key: the window or the text is too short."
