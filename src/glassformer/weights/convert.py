"""Convert tensors between two naming schemes with a name table, in both directions.

Every source tensor must be used once and every target must be filled once; otherwise an error is raised. `theirs` are
the names of the other format (Hugging Face), `ours` the names of glassformer.

The rows of a table are patterns. `{i}` is the index of a layer and `{j}` of an expert. `{p}` is the prefix of the base
model in a model with a head (`transformer.` in GPT-2), which a bare base model does not have. A row whose targets do
not exist in a model (a bias, a gate) is ignored, so one table serves every member of a family.

One tensor of theirs may hold several of ours: a fused projection, or all experts of a layer (`Row.every`). One tensor
of ours may be stored as several of theirs: `norm.weight[{j}]` is row j of ours.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.model import build
from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.tensors import Tensors

Shape = tuple[int, ...]


class Transform(Protocol):
    """A change of memory layout and its inverse."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        """Return our tensors, which have these shapes."""

    def theirs(self, ours: list[Tensor]) -> Tensor:
        """Return their tensor: the inverse of `ours`."""

    def shape(self, ours: list[Shape]) -> Shape:
        """Return the shape of `theirs`. Default: that of ours below each other.

        (Computing it on torch's meta device would import torch's compiler: 1 s.)
        """
        return (sum(part[0] for part in ours), *ours[0][1:])


class Identity(Transform):
    """The same layout on both sides."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [theirs]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0]

    def shape(self, ours: list[Shape]) -> Shape:
        return ours[0]


class OneRow(Transform):
    """A vector that is stored as a matrix of one row."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [theirs[0]]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return ours[0][None].clone()

    def shape(self, ours: list[Shape]) -> Shape:
        return (1, *ours[0])


class Conv1D(Transform):
    """The layout of GPT-2: matrices are (in, out), and `c_attn` concatenates q, k and v along out."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        sizes = [shape[0] for shape in shapes]
        return [part.t() if part.dim() == 2 else part for part in theirs.split(sizes, dim=-1)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return torch.cat([part.t() if part.dim() == 2 else part for part in ours], dim=-1).contiguous()

    def shape(self, ours: list[Shape]) -> Shape:
        return (*ours[0][1:], sum(part[0] for part in ours))


class Concatenated(Transform):
    """Several matrices (out, in) or biases below each other, in this order: q, k and v, or gate and up."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return list(theirs.split([shape[0] for shape in shapes]))

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return torch.cat(ours)


@dataclass(frozen=True)
class PerHead(Transform):
    """q, k and v by groups of heads: the queries of a group, its key, its value, then the next group.

    With as many groups as heads it is the layout of GPT-NeoX: q, k, v of head 0, then of head 1.
    """

    groups: int

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        width = shapes[1][0] // self.groups
        grouped = theirs.view(self.groups, -1, width, *theirs.shape[1:])  # (G, H/G + 2, K, ...)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        width = ours[1].shape[0] // self.groups
        grouped = [part.reshape(self.groups, -1, width, *part.shape[1:]) for part in ours]
        return torch.cat(grouped, dim=1).reshape(-1, *ours[0].shape[1:])


IDENTITY, CONV1D, CONCATENATED = Identity(), Conv1D(), Concatenated()


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
    every: int = 0
    """Number of experts, if one tensor of theirs holds all of them: `ours` are then filled for each `{j}`."""


@dataclass(frozen=True)
class Drop:
    """A known tensor of theirs that is not needed."""

    theirs: str
    reason: str
    notice: bool = False
    """True if the tensor was trained, so that the user is notified that it is dropped."""
    beyond: bool = False
    """True if only layers after the last one of the model are dropped."""


@dataclass(frozen=True)
class Move:
    """A row with its placeholders filled in: one tensor to convert."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform
    aliases: tuple[str, ...]
    strict: bool
    shape: Shape
    parts: tuple[Shape, ...]
    """The shapes of `ours`."""

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
    return re.compile(text.replace(r"\{p\}", r"(?:[a-z_]+\.)*").replace(r"\{rest\}", r".*"))


_ROW_OF = "[{j}]"


def _pattern(row: Row) -> str:
    """Return the pattern of the target that starts a row: its first name, of expert 0 if it fills all of them."""
    first = row.ours[0].removesuffix(_ROW_OF)
    return first.replace("{j}", "0") if row.every else first


def _moves(row: Row, values: Mapping[str, Any], targets: Mapping[str, Shape]) -> list[Move]:
    """Return the move of a row; none if the model lacks one of its targets, such as the gate of a fused gate and up."""
    indices = [{"j": j} for j in range(row.every)] or [{}]
    ours = tuple(name.format(**values, **index) for index in indices for name in row.ours)
    names = [name.format(**values) for name in (row.theirs, *row.aliases)]
    if any(name not in targets for name in ours):
        return []
    parts = tuple(targets[name] for name in ours)
    return [Move(names[0], ours, row.transform, tuple(names[1:]), row.strict, row.transform.shape(list(parts)), parts)]


def _row_move(row: Row, values: Mapping[str, Any], whole: Shape) -> Move:
    """Return the move of row j of one of our tensors."""
    shape = whole[1:]
    return Move(row.theirs.format(**values), (row.ours[0].format(**values),), IDENTITY, (), True, shape, (shape,))


def plan(rows: Iterable[Row], targets: Mapping[str, Shape], prefix: str, strict: bool = True) -> list[Move]:
    """Return the moves that fill each of `targets` exactly once.

    Raises:
        WeightsError: no row, or more than one, matches a target (only with `strict`).
    """
    patterns = [(_regex(_pattern(row)), row) for row in rows]
    moves: list[Move] = []
    filled: dict[str, int] = {}
    for target in targets:
        for regex, row in patterns:
            if not (match := regex.fullmatch(target)):
                continue
            values = {"p": prefix, **match.groupdict()}
            if row.ours[0].endswith(_ROW_OF):
                made = [_row_move(row, values | {"j": j}, targets[target]) for j in range(targets[target][0])]
            else:
                made = _moves(row, values, targets)
            moves += made
            for name in {name.partition("[")[0] for move in made for name in move.ours}:
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
        parts = move.transform.ours(tensors.read(source), list(move.parts))
        for name, part in zip(move.ours, parts, strict=True):
            if copy:
                state[name] = tensors.copy(source, part, common, device)
            else:
                state[name] = part.to(device=device, dtype=common)
    return _joined(state), notes


def _joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with rows `name[0]`, `name[1]`, ... stacked to `name`."""
    rows: dict[str, list[Tensor]] = {}
    for name in [name for name in state if name.endswith("]")]:
        rows.setdefault(name.partition("[")[0], []).append(state.pop(name))
    return state | {name: torch.stack(parts) for name, parts in rows.items()}


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
    layers = 1 + max((int(i) for move in moves for i in re.findall(r"\.blocks\.(\d+)\.", move.ours[0])), default=-1)
    notices: dict[str, list[str]] = {}
    unknown = []
    for name in tensors:
        if name in used:
            continue
        if (twin := tied.get(name)) and tensors.equal(name, twin):
            continue
        drop = next((drop for regex, drop in patterns if _drops(regex.fullmatch(name), drop, layers)), None)
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


def _drops(match: re.Match[str] | None, drop: Drop, layers: int) -> bool:
    return match is not None and (not drop.beyond or int(match["i"]) >= layers)


def write(state: Mapping[str, Tensor], moves: list[Move]) -> dict[str, Tensor]:
    """Convert our state dict to their tensors: the inverse of `read`."""
    used = {name.partition("[")[0] for move in moves for name in move.ours}
    extra = [name for name in state if name not in used]
    if extra:
        raise WeightsError(f"the state dict contains tensors that the name table does not have ({summarize(extra)}).")
    return {move.theirs: move.transform.theirs([_tensor(state, name) for name in move.ours]) for move in moves}


def _tensor(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of ours, or row j of it if the name is `name[j]`."""
    whole, _, index = name.partition("[")
    return state[whole][int(index[:-1])].clone() if index else state[whole]
