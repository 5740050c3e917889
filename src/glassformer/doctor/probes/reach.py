"""What an output depends on, by gradient: nothing of the future, and everything of the past that is in reach.

The embedding rows that the tokens look up become leaves of the autograd graph. The gradient of a random projection of
one output position with respect to them shows which positions it reads. A masked position gets exactly zero (its weight
is 0, and so is the derivative); a visible one does not. Perturbation also detects steps without a derivative (argmax,
rounding); the gradient covers all positions of the input at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glassformer.doctor.probes.attention import sparse_fields
from glassformer.doctor.probes.causality import CUTS, REMEDY, declared_prefix
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.measure import SAME_SHAPE
from glassformer.doctor.subject.rounding import Measured, first_over, judge
from glassformer.doctor.subject.subject import Subject
from glassformer.doctor.subject.windows import own_windows
from glassformer.finding import Finding, Verdict
from glassformer.shapes import Float, Int

STIR = 0.02
"""Noise on every parameter: an output map that starts at zero hides what lies behind it."""
FUTURE_WHY = "a masked weight is 0 and so is its derivative: exact, with a guard of 1e-7 of the visible positions'"
PAST_WHY = "a visible position has a weight above 0, however small, so its gradient is not exactly 0"
UNSEEN = "no table was looked up with the tokens, so there is nothing to take a gradient with respect to"


class Leaves(TorchFunctionMode):
    """While active, what is looked up with these tokens becomes a leaf: embedding modules, functions, indexing."""

    def __init__(self, tokens: Int[Tensor, "B T"]):
        super().__init__()
        self.tokens = tokens
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        index = self._index(func, args, kwargs or {})
        if index is None or not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        leaf = out.detach().clone().requires_grad_()
        self.found.append(leaf)
        return leaf.clone()  # a leaf may not be changed in place, and many add positions so

    def _index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if func in (F.embedding, torch.embedding):
            given = [*args, *kwargs.values()][:2]
        elif func is torch.Tensor.__getitem__ and args[0].is_floating_point():
            given = [args[1]]
        elif func is torch.index_select and len(args) > 2:
            given = [args[2]]
        else:
            return None
        same = (i for i in given if isinstance(i, Tensor) and i.numel() == self.tokens.numel())
        mine = self.tokens.reshape(-1)
        return next((i for i in same if not i.is_floating_point() and torch.equal(i.reshape(-1), mine)), None)

    def positions(self, gradients: tuple[Tensor | None, ...]) -> Float[Tensor, "B T"]:
        """The largest gradient at each position, over every table."""
        rows, length = self.tokens.shape
        size = torch.zeros(rows, length, dtype=torch.float64, device=self.tokens.device)
        for gradient in gradients:
            if gradient is not None:
                size = torch.maximum(size, gradient.detach().double().abs().reshape(rows, length, -1).amax(-1))
        return size


@dataclass
class Reading:
    """A forward with its autograd graph. `sizes(position)`: how strongly that output depends on each input position."""

    logits: Float[Tensor, "B T V"]
    leaves: Leaves

    def sizes(self, position: int) -> Float[Tensor, "B T"]:
        with torch.enable_grad():
            row = self.logits[:, position]
            direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(position)).to(row)
            along = (row * direction).sum()
        found = torch.autograd.grad(along, self.leaves.found, retain_graph=True, allow_unused=True)
        return self.leaves.positions(found)


def read(isolated: Subject, tokens: Int[Tensor, "B T"], of: Int[Tensor, "B S"] | None = None, **given: Any) -> Reading:
    """Run once with a graph; `of` are the tokens whose positions are asked about, `tokens` by default."""
    leaves = Leaves(tokens if of is None else of)
    with torch.enable_grad(), leaves:
        logits = isolated.logits(tokens, **given)
    if not leaves.found:
        raise Unsupported(UNSEEN)
    if not logits.requires_grad:
        raise Unsupported("logits carry no gradient: forward detaches them or runs without one")
    return Reading(logits, leaves)


def future_by_gradient(subject: Subject) -> Finding:
    """The gradient of the output at t with respect to the tokens after t is zero."""
    id, prefix = "causal_leak/gradient", declared_prefix(subject)

    def measure(isolated: Subject) -> Measured:
        found = []
        for length in isolated.lengths():
            reading = read(isolated, isolated.tokens(isolated.rows(3) if length == 24 else 1, length, seed=length))
            cuts = (3, 37) if isolated.large else (*CUTS, length - 2)
            for cut in sorted({c for c in cuts if prefix <= c < length - 1 and (c >= 10 or length <= 24)}):
                found.append(_future(reading, cut, length))
        return first_over(found)

    return judge(subject, id, measure, REMEDY)


def _future(reading: Reading, cut: int, length: int) -> Measured:
    sizes = reading.sizes(cut)
    if not bool(torch.isfinite(sizes).all()):
        raise Unsupported("its gradients are not all numbers, so what an output reads was not compared")
    later = sizes[:, cut + 1 :]
    evidence: dict[str, Any] = {"cut": cut, "length": length, "rows": len(sizes)}
    if float(later.max()) > 0:
        row, position = (int(v) for v in (later == later.max()).nonzero()[0])
        evidence |= {"in_row": row, "reads": cut + 1 + position}
    bound = SAME_SHAPE * max(float(sizes[:, : cut + 1].max()), 1e-30)
    return Measured(float(later.max()), bound, FUTURE_WHY, evidence)


def past_by_gradient(subject: Subject) -> Iterator[Finding]:
    """Each token that should be visible has a gradient: j <= i in a decoder, all in an encoder, the whole source."""
    id = "over_mask/gradient"
    sparse = sparse_fields(subject)
    if sparse:
        yield Finding.skip(
            id, f"the config declares {', '.join(sparse)}: which positions are in reach is not known here"
        )
        return
    yield _seen(subject, id, _past(subject))
    if subject.kind == "seq2seq":
        yield _seen(subject, "over_mask/gradient-source", _source)


def _seen(subject: Subject, id: str, measure: Callable[[Subject], Measured]) -> Finding:
    """As given, not warm: sharp attention underflows to 0. What is 0 in float64 too (e^-745) is masked."""
    remedy = "Mask only the future and padding (decoder: key <= query, itself included; encoder and source: nothing)."
    finding = judge(subject, id, measure, remedy, warm=False, own=True)
    if finding.verdict is Verdict.FAIL and "float64" not in finding.evidence:
        return Finding.skip(id, "some gradients are 0; without float64 a mask and an underflow look alike")
    return finding


def _stirred(isolated: Subject) -> None:
    if isolated.module is not None:
        generator = torch.Generator().manual_seed(11)
        for parameter in isolated.module.parameters():
            if parameter.is_floating_point():
                parameter.add_(STIR * torch.randn(parameter.shape, generator=generator).to(parameter))


def _past(subject: Subject) -> Callable[[Subject], Measured]:
    own = list(own_windows(subject).values())
    windows = own or [subject.facts.window_of(layer) for layer in range(subject.facts.whole("n_layers") or 1)]
    window = None if None in windows else max(w for w in windows if w is not None)

    def measure(isolated: Subject) -> Measured:
        _stirred(isolated)
        length = isolated.lengths()[-1]
        reading = read(isolated, isolated.tokens(isolated.rows(2), length, seed=length + 1))
        found = []
        positions = (length // 2, length - 1) if isolated.large else (2, 9, length // 2, length - 1)
        mixes = False
        for position in sorted({min(p, length - 1) for p in positions}):
            first = 0 if window is None else max(0, position - window + 1)
            last = (length if window is None else position + window) if isolated.kind == "encoder" else position + 1
            sizes = reading.sizes(position)
            mixes = mixes or bool((sizes[:, torch.arange(length) != position] > 0).any())
            found.append(_unread(sizes[:, first:last], first, position))
        if not mixes:
            raise Unsupported("no position reads another one: there is no attention, or nothing comes of it")
        return first_over(found)

    return measure


def _source(isolated: Subject) -> Measured:
    _stirred(isolated)
    source = isolated.source(2)
    reading = read(isolated, isolated.tokens(2, isolated.length(9), seed=71), of=source, source=source)
    return first_over([_unread(reading.sizes(position), 0, position) for position in (0, reading.logits.shape[1] - 1)])


def _unread(sizes: Float[Tensor, "B S"], first: int, position: int) -> Measured:
    """How many positions of the input an output does not read in any row, of those it should."""
    if not bool(torch.isfinite(sizes).all()):
        raise Unsupported("its gradients are not all numbers, so what an output reads was not compared")
    blind = (sizes == 0).all(0).nonzero().flatten()
    evidence: dict[str, Any] = {"output": position, "of": sizes.shape[1]}
    if len(blind):
        evidence |= {
            "blind": first + int(blind[-1]),
            "cause": f"output {position} does not read token {first + int(blind[-1])}",
        }
    return Measured(float(len(blind)), 0.0, PAST_WHY, evidence)
