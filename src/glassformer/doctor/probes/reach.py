"""What an output depends on, by gradient: nothing of the future, and everything of the past that is in reach.

The rows that the tokens look up are made leaves; the gradient of one output place's random projection with respect to
them says which places it reads. A forbidden place gets exactly zero (a masked weight is 0, and so is its derivative); a
visible one does not. Perturbation sees steps that have no derivative (argmax, rounding), the gradient sees all places
of the input at once and whatever a change of token happens to leave equal.
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
from glassformer.finding import Finding, Verdict
from glassformer.shapes import Float, Int

STIR = 0.02
"""Noise on every parameter: an output map that starts at zero hides what lies behind it."""
FUTURE_WHY = "a masked weight is 0 and so is its derivative: exact, with a guard of 1e-7 of the visible places'"
PAST_WHY = "a visible place has a weight above 0, however small, so its gradient is not exactly 0"
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

    def places(self, gradients: tuple[Tensor | None, ...]) -> Float[Tensor, "B T"]:
        """The largest gradient at each place, over every table."""
        rows, length = self.tokens.shape
        size = torch.zeros(rows, length, dtype=torch.float64, device=self.tokens.device)
        for gradient in gradients:
            if gradient is not None:
                size = torch.maximum(size, gradient.detach().double().abs().reshape(rows, length, -1).amax(-1))
        return size


@dataclass
class Reading:
    """A forward with its graph: `sizes(place)` is how strongly the output there depends on each place of the input."""

    logits: Float[Tensor, "B T V"]
    leaves: Leaves

    def sizes(self, place: int) -> Float[Tensor, "B T"]:
        with torch.enable_grad():
            row = self.logits[:, place]
            direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(place)).to(row)
            along = (row * direction).sum()
        found = torch.autograd.grad(along, self.leaves.found, retain_graph=True, allow_unused=True)
        return self.leaves.places(found)


def read(patient: Subject, tokens: Int[Tensor, "B T"], of: Int[Tensor, "B S"] | None = None, **given: Any) -> Reading:
    """Run once with a graph; `of` are the tokens whose places are asked about, `tokens` unless said."""
    leaves = Leaves(tokens if of is None else of)
    with torch.enable_grad(), leaves:
        logits = patient.logits(tokens, **given)
    if not leaves.found:
        raise Unsupported(UNSEEN)
    if not logits.requires_grad:
        raise Unsupported("logits carry no gradient: forward detaches them or runs without one")
    return Reading(logits, leaves)


def future_by_gradient(subject: Subject) -> Finding:
    """The gradient of the output at t with respect to the tokens after t is zero."""
    id, prefix = "causal_leak/gradient", declared_prefix(subject)

    def measure(patient: Subject) -> Measured:
        found = []
        for length in patient.lengths():
            reading = read(patient, patient.tokens(patient.rows(3) if length == 24 else 1, length, seed=length))
            cuts = (3, 37) if patient.large else (*CUTS, length - 2)
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
        row, place = (int(v) for v in (later == later.max()).nonzero()[0])
        evidence |= {"in_row": row, "reads": cut + 1 + place}
    bound = SAME_SHAPE * max(float(sizes[:, : cut + 1].max()), 1e-30)
    return Measured(float(later.max()), bound, FUTURE_WHY, evidence)


def past_by_gradient(subject: Subject) -> Iterator[Finding]:
    """Each token that should be visible has a gradient: j <= i in a decoder, all in an encoder, the whole source."""
    id = "over_mask/gradient"
    sparse = sparse_fields(subject)
    if sparse:
        yield Finding.skip(id, f"the config declares {', '.join(sparse)}: which places are in reach is not known here")
        return
    yield _seen(subject, id, _past(subject))
    if subject.kind == "seq2seq":
        yield _seen(subject, "over_mask/gradient-source", _source)


def _seen(subject: Subject, id: str, measure: Callable[[Subject], Measured]) -> Finding:
    """As given, not warm: sharp attention underflows to 0. What is 0 in float64 too (e^-745) is masked."""
    remedy = "Mask only the future and padding (decoder: key <= query, itself included; encoder and source: nothing)."
    finding = judge(subject, id, measure, remedy, warm=False)
    if finding.verdict is Verdict.FAIL and "float64" not in finding.evidence:
        return Finding.skip(id, "some gradients are 0; without float64 a mask and an underflow look alike")
    return finding


def _stirred(patient: Subject) -> None:
    if patient.module is not None:
        generator = torch.Generator().manual_seed(11)
        for parameter in patient.module.parameters():
            if parameter.is_floating_point():
                parameter.add_(STIR * torch.randn(parameter.shape, generator=generator).to(parameter))


def _past(subject: Subject) -> Callable[[Subject], Measured]:
    windows = [subject.facts.window_of(layer) for layer in range(subject.facts.whole("n_layers") or 1)]
    window = None if None in windows else max(w for w in windows if w is not None)

    def measure(patient: Subject) -> Measured:
        _stirred(patient)
        length = patient.lengths()[-1]
        reading = read(patient, patient.tokens(patient.rows(2), length, seed=length + 1))
        found = []
        places = (length // 2, length - 1) if patient.large else (2, 9, length // 2, length - 1)
        mixes = False
        for place in sorted({min(p, length - 1) for p in places}):
            first = 0 if window is None else max(0, place - window + 1)
            last = (length if window is None else place + window) if patient.kind == "encoder" else place + 1
            sizes = reading.sizes(place)
            mixes = mixes or bool((sizes[:, torch.arange(length) != place] > 0).any())
            found.append(_unread(sizes[:, first:last], first, place))
        if not mixes:
            raise Unsupported("no place reads another one: there is no attention, or nothing comes of it")
        return first_over(found)

    return measure


def _source(patient: Subject) -> Measured:
    _stirred(patient)
    source = patient.source(2)
    reading = read(patient, patient.tokens(2, patient.length(9), seed=71), of=source, source=source)
    return first_over([_unread(reading.sizes(place), 0, place) for place in (0, reading.logits.shape[1] - 1)])


def _unread(sizes: Float[Tensor, "B S"], first: int, place: int) -> Measured:
    """How many places of the input an output does not read in any row, of those it should."""
    if not bool(torch.isfinite(sizes).all()):
        raise Unsupported("its gradients are not all numbers, so what an output reads was not compared")
    blind = (sizes == 0).all(0).nonzero().flatten()
    evidence: dict[str, Any] = {"output": place, "of": sizes.shape[1]}
    if len(blind):
        evidence |= {
            "blind": first + int(blind[-1]),
            "cause": f"output {place} does not read token {first + int(blind[-1])}",
        }
    return Measured(float(len(blind)), 0.0, PAST_WHY, evidence)
