"""Where a token stands: used at all, in every layer and head, near and far. relative.py has what only distances may do.

A row of one repeated token takes everything but position away. In a relative scheme (rotary, ALiBi, T5) the stream is
then the same at every position and in every layer: scores may depend on the distance alone, values on nothing.

An attention is judged only if what its projections read is the same at every position (`Constant.steady`). Recurrences,
convolutions, attention sinks and padding inside the model end that, in the layers after them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.anatomy.record import storage_of
from glassformer.anatomy.scores import hidden_keys
from glassformer.anatomy.trace import Trace
from glassformer.doctor.probes.attention import Seen, look
from glassformer.doctor.probes.rotation import rotation_of
from glassformer.doctor.probes.step import vectors
from glassformer.doctor.subject.measure import gap, rms, ulp
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict

FLAT = 1e-5
"""Relative; rounding of float32 over a few layers stays below, any scheme of positions far above."""

CAPPED = 0.99
"""Of the largest score of a capped attention: c·tanh(s/c) hardly changes above that."""

PADDED = "the model pads its input itself, so its first layer reads positions that are no tokens"
UNSTEADY = (
    "before its first attention a repeated token already differs from position to position (a recurrence, a "
    "convolution or padding), so scores show more than positions"
)

SOURCE = 11
"""Length of the source of an encoder-decoder."""
FREE = ("nope", "no_rope", "norope", "no_position")
"""Words of fields that say which layers go without positions."""


@dataclass
class Constant:
    """What a forward of one repeated token shows."""

    seen: list[Seen] = field(default_factory=list)
    stream: Tensor | None = None
    """Input of the first layer at row 0: (T,D)."""
    source: Tensor | None = None
    """In an encoder-decoder, input of the encoder's first layer at row 0: (S,D)."""
    tables: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)
    """Tables other than the vocabulary's, with the rows looked up."""
    logits: Tensor | None = None
    unsteady: set[int] = field(default_factory=set)
    """Identity of each Seen whose projections read different vectors at different positions."""
    padded: bool = False
    """Whether the first layer reads more positions than there are tokens: the model pads its input itself."""

    def steady(self) -> list[Seen]:
        """Self-attentions whose projections read one and the same vector at every position."""
        return [s for s in self.seen if s.role in ("self", "encoder") and id(s) not in self.unsteady]

    @property
    def absolute(self) -> bool | None:
        """Whether the stream itself tells positions apart; None when it was not seen."""
        return (
            None
            if self.stream is None
            else gap(self.stream, self.stream[:1].expand_as(self.stream)) > FLAT * rms(self.stream)
        )


def repeated_token(subject: Subject, warm: float = 1.0, stirred: bool = False) -> Constant:
    """Trace a constant row as long as the model takes; `stirred` adds a little noise to every weight."""
    length = subject.length(65 if subject.large else 129)
    found = Constant()
    with subject.isolated(warm, own=stirred) as isolated:
        if stirred:
            stir(isolated)
        token = isolated.tokens(1, 1, seed=17)
        tokens = token.expand(2, length).contiguous()
        given = {"source": token.expand(2, SOURCE).contiguous()} if isolated.kind == "seq2seq" else {}
        with _first_input(isolated, found, length):
            trace = trace_call(isolated, tokens, **given)
        found.seen = look(isolated, trace, 2, length)
        found.unsteady = {id(s) for s in found.seen if not _reads_one_vector(s, trace, isolated)}
        found.logits = trace.logits
        if isolated.module is not None:
            tables = {storage_of(p): p for p in isolated.module.parameters() if p.dim() == 2}
            for storage, rows, indices, path in trace.lookups:
                if storage in tables and rows != subject.vocab_size and indices.shape[-1:] == (length,):
                    found.tables.append((tables[storage].detach().cpu(), indices.reshape(-1, length)[0], path))
    return found


def stir(isolated: Subject, size: float = 0.02) -> None:
    """Add noise to every parameter: one that starts at zero hides what lies behind it."""
    if isolated.module is not None:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in isolated.module.parameters():
                if parameter.is_floating_point():
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))


def _reads_one_vector(one: Seen, trace: Trace, isolated: Subject) -> bool:
    """Whether the projections of q, k and v in this layer read the same vector at every position.

    Where no projection is recognised, the first layer counts as steady and later ones do not.
    """
    blocks = isolated.blocks()
    maps, layer = one.attention.maps | one.attention.v_maps, layer_of(one.attention.path, blocks)
    read = [m.input for m in trace.linears if m.weight in maps and layer_of(m.path, blocks) == layer]
    if not read:
        return one.layer in (0, None)
    return all(_one_vector(x) for x in read)


def _one_vector(x: Tensor, rows: int = 2) -> bool:
    """Whether each row of a batch repeats one vector, in a layout with the batch first or with time first."""
    if x.numel() % (rows * x.shape[-1]):
        return False
    bound = max(FLAT, 8 * ulp(x.dtype)) * max(rms(x), 1e-30)
    orders = (x.reshape(rows, -1, x.shape[-1]), x.reshape(-1, rows, x.shape[-1]).transpose(0, 1))
    return any(gap(y, y[:, :1].expand_as(y)) <= bound for y in orders)


@contextlib.contextmanager
def _first_input(isolated: Subject, found: Constant, length: int) -> Iterator[None]:
    blocks = list(isolated.blocks().items())
    encoder = [b for n, b in blocks if any("enc" in part for part in n.split("."))]
    stack = [b for _, b in blocks if b not in encoder] or [b for _, b in blocks]

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        stream = next((a for a in [*args, *kwargs.values()] if isinstance(a, Tensor) and a.dim() == 3), None)
        if stream is None:
            return
        if isolated.kind == "seq2seq" and module in encoder:
            if SOURCE in stream.shape[:2] and found.source is None:
                found.source = (stream if stream.shape[1] == SOURCE else stream.transpose(0, 1))[0].detach().clone()
        elif found.stream is None:
            if stream.shape[0] == length != stream.shape[1]:
                stream = stream.transpose(0, 1)  # time first
            found.padded = stream.shape[1] > length
            found.stream = stream[0].detach().clone()

    watched = [*stack[:1], *(encoder[:1] if isolated.kind == "seq2seq" and encoder[:1] != stack[:1] else [])]
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def scheme(subject: Subject, constant: Constant) -> str | None:
    """The declared scheme, else what the repeated token and parameter names show; None: no sign of positions."""
    declared = subject.facts.position_kind
    if declared is not None:
        return declared
    if constant.absolute:
        return "learned" if constant.tables else "sinusoidal"
    if any(_turns(one) for one in constant.steady()):
        return "rotary"
    names = [n for n, _ in subject.module.named_parameters()] if subject.module is not None else []
    names += [n for n, _ in subject.module.named_buffers()] if subject.module is not None else []
    for kind, words in (
        ("alibi", ("alibi", "slope")),
        ("rotary", ("rope", "rotary", "inv_freq")),
        ("t5", ("relative",)),
    ):
        if any(word in name.lower() for name in names for word in words):
            return kind
    if any("pos" in name.lower() or "wpe" in name.lower() for name in names):
        return "learned"
    return _kind_of_table(subject, constant)


def _kind_of_table(subject: Subject, constant: Constant) -> str | None:
    """The scheme of a tensor that has a different row for each position, whatever it is called and used or not."""
    if subject.module is None or constant.stream is None:
        return None
    width = constant.stream.shape[-1]
    heads = {seen.attention.q.shape[-1] for seen in constant.seen}
    found = {**dict(subject.module.named_buffers()), **dict(subject.module.named_parameters())}
    for table in (t.detach().squeeze() for t in found.values() if t.is_floating_point() or t.is_complex()):
        if table.dim() != 2 or len(table) in (subject.vocab_size, table.shape[1]) or len(table) < subject.limit:
            continue
        if not bool((table != table[:1]).any(-1)[1:].all()):
            continue
        if table.shape[1] == width:
            return "learned" if table.requires_grad else "sinusoidal"
        if table.shape[1] in heads | {size // 2 for size in heads}:
            return "rotary"
    return None


def _turns(one: Seen) -> bool:
    """Whether q or k of a repeated token turns in pairs from position to position, which is a rotation."""
    parts = vectors(one.attention, 2)
    return parts is not None and any(rotation_of(x[0, 0], dtype=one.coarsest).pairing is not None for x in parts[:2])


def positions_are_used(subject: Subject, constant: Constant) -> Iterator[Finding]:
    """The same token at two positions gives different outputs, near and far, in every head of a relative scheme."""
    id, kind = "position_missing/repeated-token", scheme(subject, constant)
    if kind in (None, "none"):
        yield Finding.skip(id, "no positions are declared, which is a legitimate design")
        return
    own = constant.steady()
    if own and all(not bool(s.scores[~hidden_keys(s.scores)].any()) for s in own):
        # fresh keys or queries that are all zero say nothing about positions
        constant = repeated_token(subject, stirred=True)
        own = constant.steady()
    if constant.padded:
        yield Finding.skip(id, PADDED)
        return
    if (blind := _source_positions(constant)) is not None:
        yield blind
        return
    if constant.absolute:
        yield _rows_differ(constant)
        return
    if any(not bool(table.any()) for table, _, _ in constant.tables):
        yield Finding.skip(id, "the position table is all zero: at the start of training positions cannot differ")
        return
    if not own:
        why = UNSTEADY if constant.seen else "attention was not seen, and a relative scheme shows nowhere else"
        yield Finding.skip(id, why)
        return
    flat = [(s, spread(s)) for s in own]
    nowhere_seen = all(float(s.max()) <= 0 for _, s in flat)
    everywhere = nowhere_seen and len(own) == len(constant.seen)  # positions may enter in a layer that cannot be judged
    # layers without positions are a design, where it is declared
    free = any(v and any(w in k.lower() for w in FREE) for k, v in subject.facts.raw.items() if k != "position")
    foreign = subject.interface.library or free
    without = subject.facts.raw.get("layers_without_positions", ())
    if kind == "rotary" and (rotated := _rotated_but_flat(flat)) is not None:
        yield rotated
        return
    if not everywhere and regular([bool((spreads <= 0).all()) for _, spreads in flat]):
        yield Finding(id, Verdict.SKIP, 0.0, 0.0, REGULAR, "", {"explained": True, "scheme": kind})
        return
    for one, spreads in flat:
        dead = (spreads <= 0).all(-1).nonzero().flatten().tolist()
        if everywhere or (dead and not foreign and one.layer not in without and kind in ("rotary", "alibi")):
            where = "any layer" if everywhere else f"{one.location}, heads {dead}"
            yield Finding(
                id,
                Verdict.FAIL,
                float(spreads.max()),
                0.0,
                f"positions ({kind}) do not reach the scores of {where}: a repeated token scores the same everywhere",
                "Add the position embedding to the tokens (or rotate, or add the bias to scores) and use the result.",
                {"layer": None if everywhere else one.layer, "heads": dead, "scheme": kind},
            )
            return
    if nowhere_seen:
        yield Finding.skip(id, UNSTEADY)
        return
    yield _far_positions(flat, kind)


REGULAR = (
    "some layers have no positions, in a regular order (every second one, 3 + 1): a design, and no forgotten argument "
    "gives that order"
)


def regular(without: list[bool]) -> bool:
    """Whether layers without positions and layers with them repeat a pattern at least twice."""
    periods = range(2, len(without) // 2 + 1)
    return len(set(without)) == 2 and any(all(w == without[i % p] for i, w in enumerate(without)) for p in periods)


def _source_positions(constant: Constant) -> Finding | None:
    """Whether the encoder of an encoder-decoder knows no order although its decoder does."""
    own = [s for s in constant.seen if s.role == "encoder"]
    if constant.source is None or not own or any(id(s) in constant.unsteady or s.attention.capped for s in own):
        return None
    if gap(constant.source, constant.source[:1].expand_as(constant.source)) > FLAT * rms(constant.source):
        return None
    if any(float(spread(s).max()) > 0 for s in own):
        return None
    why = "positions reach the scores of no layer of the encoder: a repeated source token scores the same everywhere"
    remedy = "Add the position embedding to the source tokens too (or rotate, or add the bias to scores)."
    return Finding("position_missing/source", Verdict.FAIL, 0.0, 0.0, why, remedy, {"stack": own[0].stack})


def _rotated_but_flat(flat: list[tuple[Seen, Tensor]]) -> Finding | None:
    """q or k is multiplied by component, yet scores do not vary: turned on one side, or along another axis."""
    for one, spreads in flat:
        q, k = one.attention.rotated
        if float(spreads.max()) <= 0 and (q or k):
            how = "by something that is not the position" if q and k else f"{'q' if q else 'k'} alone is rotated"
            why = f"in {one.location} {how}: a repeated token scores the same everywhere"
            remedy = "Rotate q and k both, by their own position along the time axis."
            return Finding("rope_relative/rotated", Verdict.FAIL, 0.0, None, why, remedy, {"layer": one.layer})
    return None


def spread(one: Seen) -> Tensor:
    """(H,T): how much a query's scores vary over the up to 8 keys nearest to it; 0 where they do not.

    Scores at their soft cap do not vary whatever the positions do: there the largest spread stands in.
    """
    scores = one.scores[0].double()
    hidden = hidden_keys(one.scores)[0]
    size = float(scores[~hidden].abs().max()) if bool((~hidden).any()) else 1.0
    rows = []
    for i in range(1, scores.shape[-2]):
        near = slice(max(0, i - 8), i + 1)
        part, out = scores[:, i, near], hidden[:, i, near]
        high = torch.where(out, -torch.inf, part).amax(-1)
        low = torch.where(out, torch.inf, part).amin(-1)
        unknown = (~out).sum(-1) < 2
        if one.attention.capped:
            unknown |= torch.where(out, torch.inf, part.abs()).amin(-1) > CAPPED * size
        rows.append(torch.where(unknown, torch.nan, high - low))
    spreads = torch.stack(rows, dim=-1)
    fill = torch.nan_to_num(spreads, nan=0.0).amax() if not bool(spreads.isnan().all()) else spreads.new_tensor(size)
    spreads = torch.where(spreads.isnan(), fill, spreads)
    return torch.where(spreads <= FLAT * max(size, 1e-12), 0.0, spreads)


def _far_positions(flat: list[tuple[Seen, Tensor]], kind: str) -> Finding:
    for one, spreads in flat:
        alive = spreads.amax(0) > 0
        if bool(alive.any()) and not bool(alive.all()):
            first = int((~alive).nonzero()[0]) + 1
            return Finding(
                "position_missing/far",
                Verdict.FAIL,
                float(first),
                None,
                f"from position {first} on, {one.location} scores neighbouring positions alike: positions stop there",
                "Let positions go on to the model's full length: no clamp, no shorter table.",
                {"layer": one.layer, "first": first, "scheme": kind},
            )
    return Finding(
        "position_missing/repeated-token", Verdict.PASS, why="scores of a repeated token vary with the position"
    )


def _rows_differ(constant: Constant) -> Finding:
    """Absolute positions: no two positions enter with the same vector, and no position without one."""
    assert constant.stream is not None
    stream, remedy = (
        constant.stream.cpu().double(),
        "Give every position its own row: no padding_idx in the table, no clamp, the right axis.",
    )
    apart = torch.cdist(stream, stream) + torch.eye(len(stream), dtype=stream.dtype) * 1e9
    close = (apart <= FLAT * rms(stream) * stream.shape[-1] ** 0.5).nonzero()
    id = "position_missing/rows"
    if len(close):
        a, b = (int(v) for v in close[0])
        why = f"positions {a} and {b} enter with the same vector ({len(close) // 2} such pairs)"
        return Finding(id, Verdict.FAIL, float(len(close) // 2), 0.0, why, remedy, {"first": a, "second": b})
    for table, rows, path in constant.tables:
        if len(rows.unique()) < len(rows) // 2 or not bool(table.any()):
            continue  # segments, or a table that has not been trained yet
        empty = [int(i) for i in (table[rows].abs().amax(-1) == 0).nonzero().flatten()]
        if empty:
            why = f"position {empty[0]} has a position row of zeros in {path or 'the table'}"
            return Finding(id, Verdict.FAIL, float(len(empty)), 0.0, why, remedy, {"first": empty[0]})
    return Finding(id, Verdict.PASS, 0.0, 0.0, "every position enters with its own vector")
