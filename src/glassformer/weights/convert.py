"""A name table applied in both directions: every source tensor used once, every target filled once, or an error.

A table is rows of patterns. `{i}` is a layer and `{j}` an expert; `{p}` is the prefix that a model with a head puts
before its base model's names (`transformer.` in GPT-2) and that a bare base model leaves out. A row whose targets a
model does not have (a bias, a gate) is not used, so one table serves every member of a family.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glassformer.weights.errors import WeightsError, some
from glassformer.weights.tensors import Tensors

Shape = tuple[int, ...]


class Transform(Protocol):
    """A change of layout and its inverse."""

    def ours(self, theirs: Tensor, sizes: list[int]) -> list[Tensor]:
        """The tensors that a foreign one holds; `sizes` are their shares of its last dimension, if it joins them."""

    def theirs(self, ours: list[Tensor]) -> Tensor: ...

    def shape(self, ours: list[Shape]) -> Shape:
        """That of `theirs`. Asked of torch's meta device instead, it would import torch's compiler for a second."""


class Same:
    """Stored as we store it."""

    def ours(self, theirs: Tensor, sizes: list[int]) -> list[Tensor]:
        return [theirs]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0]

    def shape(self, ours: list[Shape]) -> Shape:
        return ours[0]


class Conv1D:
    """GPT-2's layout: matrices (in, out), and several of ours joined along out (q, k, v in `c_attn`)."""

    def ours(self, theirs: Tensor, sizes: list[int]) -> list[Tensor]:
        return [part.t() if part.dim() == 2 else part for part in theirs.split(sizes, dim=-1)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return torch.cat([part.t() if part.dim() == 2 else part for part in ours], dim=-1).contiguous()

    def shape(self, ours: list[Shape]) -> Shape:
        return (*ours[0][1:], sum(part[0] for part in ours))


SAME, CONV1D = Same(), Conv1D()


@dataclass(frozen=True)
class Row:
    """One foreign tensor and ours."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform = SAME
    aliases: tuple[str, ...] = ()
    """Other names of the same values. Read when `theirs` is absent; equal to it, or an error, when both are there."""
    tied_to: str = ""
    """The foreign tensor that this one must equal when the model has no target for it: a tied head's duplicate."""
    strict: bool = True
    """False: an alias may differ, because the foreign model computes with `theirs` alone."""


@dataclass(frozen=True)
class Drop:
    """A foreign tensor that is known and not needed."""

    theirs: str
    reason: str
    notice: bool = False
    """Whether dropping loses something that was trained, and has to be said."""


@dataclass(frozen=True)
class Move:
    """A row with its placeholders filled."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform
    aliases: tuple[str, ...]
    strict: bool
    shape: Shape

    def source(self, tensors: Tensors) -> str | None:
        return next((name for name in (self.theirs, *self.aliases) if name in tensors), None)


def linear(theirs: str, *ours: str, transform: Transform = SAME) -> tuple[Row, Row]:
    """Rows of a module's weight and bias: also those of a norm."""
    weight, bias = (Row(f"{theirs}.{part}", tuple(f"{o}.{part}" for o in ours), transform) for part in _PARTS)
    return weight, bias


_PARTS = ("weight", "bias")


def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)")
    return re.compile(text.replace(r"\{p\}", r"(?:[a-z]+\.)?"))


def plan(rows: Iterable[Row], targets: Mapping[str, Shape], prefix: str, strict: bool = True) -> list[Move]:
    """The moves that fill `targets`, each exactly once; a target that no row knows is an error, if `strict`."""
    patterns = [(_regex(row.ours[0]), row) for row in rows]
    moves: list[Move] = []
    filled: dict[str, int] = {}
    for target in targets:
        for regex, row in patterns:
            if not (match := regex.fullmatch(target)):
                continue
            values = {"p": prefix, **match.groupdict()}
            ours = tuple(name.format(**values) for name in row.ours)
            names = [name.format(**values) for name in (row.theirs, *row.aliases)]
            shape = row.transform.shape([targets[name] for name in ours])
            moves.append(Move(names[0], ours, row.transform, tuple(names[1:]), row.strict, shape))
            for name in ours:
                filled[name] = filled.get(name, 0) + 1
    wrong = [name for name in targets if filled.get(name, 0) != 1]
    if wrong and strict:
        raise WeightsError(f"the name table has no single row for {some(wrong)}: these parts cannot be converted.")
    return moves


def read(
    tensors: Tensors,
    moves: list[Move],
    rows: Iterable[Row],
    drops: Iterable[Drop],
    prefix: str,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    copy: bool = True,
) -> tuple[dict[str, Tensor], list[str]]:
    """Our state dict out of foreign tensors, and the notices of what was dropped. Checked whole before it is read.

    Tensors are copied one by one, so that memory holds the weights once and nothing depends on the file any more; with
    `copy` False they are views of the file where dtype and device allow.
    """
    used = _check_sources(tensors, moves)
    notes = _account_for_rest(tensors, used, moves, rows, drops, prefix)
    dtypes = [tensors.dtype(name) for move in moves if (name := move.source(tensors))]
    whole = dtype or _common(dtypes)
    if len(set(dtypes)) > 1 and dtype is None:
        notes.append(f"the file mixes {some(sorted({str(d) for d in dtypes}))}; all was read as {whole}.")
    state: dict[str, Tensor] = {}
    for move in moves:
        source = move.source(tensors)
        assert source is not None  # _check_sources
        share = move.shape[-1] // len(move.ours) if move.shape else 1
        parts = move.transform.ours(tensors.read(source), [share] * len(move.ours))
        for name, part in zip(move.ours, parts, strict=True):
            if copy:
                state[name] = torch.empty(part.shape, dtype=whole, device=device).copy_(part)
            else:
                state[name] = part.to(device=device, dtype=whole)
    return state, notes


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds every tensor without loss."""
    out = dtypes[0]
    for dtype in dtypes[1:]:
        out = torch.promote_types(out, dtype)
    return out


def _check_sources(tensors: Tensors, moves: list[Move]) -> set[str]:
    """Presence, shape and aliases of every source; returns the names that are accounted for."""
    used: set[str] = set()
    missing, shapes, unequal = [], [], []
    for move in moves:
        source = move.source(tensors)
        if source is None:
            missing.append(f"{move.theirs} {list(move.shape)}")
            continue
        if tensors.shape(source) != move.shape:
            shapes.append(f"{source} is {list(tensors.shape(source))}, expected {list(move.shape)}")
        for alias in (name for name in move.aliases if name in tensors and name != source):
            used.add(alias)
            if move.strict and not tensors.equal(source, alias):
                unequal.append(f"{alias} differs from {source}")
        used.add(source)
    if missing:
        raise WeightsError(
            f"the weights lack tensors that config.json asks for ({some(missing)}): the two do not belong together, or "
            "the file is incomplete."
        )
    if shapes:
        raise WeightsError(
            f"tensors have other shapes than config.json gives ({some(shapes)}): correct config.json or the weights."
        )
    if unequal:
        raise WeightsError(f"copies that must be equal are not ({some(unequal)}): it is unclear which one is meant.")
    return used


def _account_for_rest(
    tensors: Tensors, used: set[str], moves: list[Move], rows: Iterable[Row], drops: Iterable[Drop], prefix: str
) -> list[str]:
    """Every tensor not used is a tied duplicate or known and dropped, or it is an error."""
    sources = {move.theirs: move.source(tensors) for move in moves}
    tied = {row.theirs: sources.get(row.tied_to.format(p=prefix)) for row in rows if row.tied_to}
    patterns = [(_regex(drop.theirs), drop) for drop in drops]
    notices: dict[str, list[str]] = {}
    unknown = []
    for name in tensors:
        if name in used:
            continue
        if (twin := tied.get(name)) and tensors.equal(name, twin):
            continue
        drop = next((drop for regex, drop in patterns if regex.fullmatch(name)), None)
        if drop is None:
            unknown.append(f"{name} {list(tensors.shape(name))}")
        elif drop.notice:
            notices.setdefault(drop.reason, []).append(name)
    if unknown:
        raise WeightsError(
            f"the weights hold tensors that the model of config.json has no place for ({some(unknown)}): config.json "
            "does not describe this file, or it carries a head that is not supported."
        )
    return [f"dropped {some(names)} ({reason})." for reason, names in notices.items()]


def write(state: Mapping[str, Tensor], moves: list[Move]) -> dict[str, Tensor]:
    """Foreign tensors out of our state dict: the inverse of `read`."""
    used = {name for move in moves for name in move.ours}
    extra = [name for name in state if name not in used]
    if extra:
        raise WeightsError(f"the state dict holds tensors that no row takes ({some(extra)}).")
    return {move.theirs: move.transform.theirs([state[name] for name in move.ours]) for move in moves}
