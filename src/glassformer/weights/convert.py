"""Convert tensors between two naming schemes with a name table, in both directions.

Every source tensor must be used once and every target must be filled once; otherwise an error is raised. `theirs` are
the names of the other format (Hugging Face), `ours` the names of glassformer.

The rows of a table are patterns. `{i}` is the index of a layer and `{j}` of an expert. `{p}` is the prefix of the base
model in a model with a head (`transformer.` in GPT-2), which a bare base model does not have. A row whose targets do
not exist in a model (a bias, a gate) is ignored, so one table serves every member of a family.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.model import build
from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.tensors import Tensors

Shape = tuple[int, ...]


class Transform(Protocol):
    """A change of memory layout and its inverse."""

    def ours(self, theirs: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return our tensors. `sizes` are their sizes along the last dimension if `theirs` concatenates several."""

    def theirs(self, ours: list[Tensor]) -> Tensor:
        """Return their tensor: the inverse of `ours`."""

    def shape(self, ours: list[Shape]) -> Shape:
        """Return the shape of `theirs`. (Computing it on torch's meta device would import torch's compiler: 1 s.)"""


class Identity:
    """The same layout on both sides."""

    def ours(self, theirs: Tensor, sizes: list[int]) -> list[Tensor]:
        return [theirs]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0]

    def shape(self, ours: list[Shape]) -> Shape:
        return ours[0]


class Conv1D:
    """The layout of GPT-2: matrices are (in, out), and `c_attn` concatenates q, k and v along out."""

    def ours(self, theirs: Tensor, sizes: list[int]) -> list[Tensor]:
        return [part.t() if part.dim() == 2 else part for part in theirs.split(sizes, dim=-1)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return torch.cat([part.t() if part.dim() == 2 else part for part in ours], dim=-1).contiguous()

    def shape(self, ours: list[Shape]) -> Shape:
        return (*ours[0][1:], sum(part[0] for part in ours))


IDENTITY, CONV1D = Identity(), Conv1D()


@dataclass(frozen=True)
class Row:
    """One tensor of theirs and the tensors of ours that it contains."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform = IDENTITY
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor. An alias is read if `theirs` is absent. If both exist, they must be equal."""
    tied_to: str = ""
    """Name of the tensor that this one must equal if the model has no target for it: the copy stored by a tied head."""
    strict: bool = True
    """False if an alias may differ, because the other implementation uses only `theirs`."""


@dataclass(frozen=True)
class Drop:
    """A known tensor of theirs that is not needed."""

    theirs: str
    reason: str
    notice: bool = False
    """True if the tensor was trained, so that the user is notified that it is dropped."""


@dataclass(frozen=True)
class Move:
    """A row with its placeholders filled in: one tensor to convert."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform
    aliases: tuple[str, ...]
    strict: bool
    shape: Shape

    def source(self, tensors: Tensors) -> str | None:
        """Return the name under which the tensor is stored; None if it is missing."""
        return next((name for name in (self.theirs, *self.aliases) if name in tensors), None)


def linear(theirs: str, *ours: str, transform: Transform = IDENTITY) -> tuple[Row, Row]:
    """Return the rows for weight and bias of a linear layer or a norm."""
    weight, bias = (Row(f"{theirs}.{part}", tuple(f"{o}.{part}" for o in ours), transform) for part in _PARTS)
    return weight, bias


_PARTS = ("weight", "bias")


def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)")
    return re.compile(text.replace(r"\{p\}", r"(?:[a-z]+\.)?"))


def plan(rows: Iterable[Row], targets: Mapping[str, Shape], prefix: str, strict: bool = True) -> list[Move]:
    """Return the moves that fill each of `targets` exactly once.

    Raises:
        WeightsError: no row, or more than one, matches a target (only with `strict`).
    """
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
        raise WeightsError(
            f"the name table does not have exactly one row for {summarize(wrong)}: these cannot be converted."
        )
    return moves


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter of a config by name, without allocating them."""
    return {name: tuple(tensor.shape) for name, tensor in build(config, device="meta").state_dict().items()}


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
    """Convert their tensors to our state dict; return it with notes about dropped tensors.

    All names and shapes are checked before any tensor is read. Tensors are copied one by one, so the weights exist only
    once in memory and no longer depend on the file. With `copy=False` they are views of the file where dtype and device
    allow it.
    """
    used = _check_sources(tensors, moves)
    notes = _account_for_rest(tensors, used, moves, rows, drops, prefix)
    dtypes = [tensors.dtype(name) for move in moves if (name := move.source(tensors))]
    common = dtype or _common(dtypes)
    if len(set(dtypes)) > 1 and dtype is None:
        mixed = summarize(sorted({str(d) for d in dtypes}))
        notes.append(f"the file mixes dtypes ({mixed}); all tensors were read as {common}.")
    state: dict[str, Tensor] = {}
    for move in moves:
        source = move.source(tensors)
        assert source is not None  # _check_sources
        share = move.shape[-1] // len(move.ours) if move.shape else 1
        parts = move.transform.ours(tensors.read(source), [share] * len(move.ours))
        for name, part in zip(move.ours, parts, strict=True):
            if copy:
                state[name] = tensors.copy(source, part, common, device)
            else:
                state[name] = part.to(device=device, dtype=common)
    return state, notes


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    """Return the narrowest dtype that represents every tensor without loss."""
    out = dtypes[0]
    for dtype in dtypes[1:]:
        out = torch.promote_types(out, dtype)
    return out


def _check_sources(tensors: Tensors, moves: list[Move]) -> set[str]:
    """Check that every source tensor exists, has the right shape and equals its aliases; return the names used."""
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
            f"the weights lack tensors that config.json requires ({summarize(missing)}): config.json describes another "
            "model, or the file is incomplete."
        )
    if shapes:
        raise WeightsError(
            f"tensors do not have the shapes that config.json requires ({summarize(shapes)}): correct config.json or "
            "the weights."
        )
    if unequal:
        raise WeightsError(f"tensors that must be equal differ ({summarize(unequal)}): remove the wrong one of each.")
    return used


def _account_for_rest(
    tensors: Tensors, used: set[str], moves: list[Move], rows: Iterable[Row], drops: Iterable[Drop], prefix: str
) -> list[str]:
    """Check that every unused tensor is the copy of a tied head or a known drop; return notes about the drops."""
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
            f"the weights contain tensors that the model of config.json does not have ({summarize(unknown)}): "
            "config.json does not describe this file, or the file contains a head that is not supported."
        )
    return [f"dropped {summarize(names)} ({reason})." for reason, names in notices.items()]


def write(state: Mapping[str, Tensor], moves: list[Move]) -> dict[str, Tensor]:
    """Convert our state dict to their tensors: the inverse of `read`."""
    used = {name for move in moves for name in move.ours}
    extra = [name for name in state if name not in used]
    if extra:
        raise WeightsError(f"the state dict contains tensors that the name table does not have ({summarize(extra)}).")
    return {move.theirs: move.transform.theirs([state[name] for name in move.ours]) for move in moves}
