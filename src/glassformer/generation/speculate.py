"""Speculative decoding: something cheap proposes k tokens, the model judges them all in one pass, none is lost.

Leviathan, Kalman and Matias 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023 (arXiv:2302.01318, algorithm 2).
Proposal x_i was drawn from q_i; one forward of the model over k + 1 places gives p_1 before x_1 to p_{k+1} after x_k.
From the first on, x_i is accepted with probability

    min(1, p_i(x_i) / q_i(x_i));

at the first that is not, one token is drawn from  max(0, p_i - q_i) / sum_y max(0, p_i(y) - q_i(y))  instead, and the
pass ends; when all are accepted one more is drawn from p_{k+1}. Every pass gains 1 to k + 1 tokens, and each of them
has the distribution p, whatever q is: q(x) min(1, p(x)/q(x)) = min(p(x), q(x)), a rejection has the probability
1 - sum_y min(p(y), q(y)) = sum_y max(0, p(y) - q(y)), and min(p, q) + max(0, p - q) = p.

p and q are what `Sampling` makes of the logits, the repetition penalty of place i counting the proposals before it. At
temperature 0 both are point masses: a proposal is accepted when it is the model's own choice.

A rejected token leaves its keys and values behind; `Cache.crop` takes them back off before the next pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generation.engine import (
    Call,
    Engine,
    Implementation,
    Precision,
    choose_engine,
    fall_back,
    in_precision,
    unsupported_by_kernels,
)
from glassformer.generation.feed import ends_with, evaluating, one_thread
from glassformer.generation.sampling import Sampling, choose, distribution, draw
from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.decoder import CHUNK, NativeDecoder
from glassformer.model import DecoderLM, Model
from glassformer.model.cache import CacheKind
from glassformer.shapes import Bool, Float

Draft = DecoderLM | Literal["lookup"]
LONGEST = 3
"""Tokens of the longest suffix that prompt lookup looks for."""


@dataclass(frozen=True)
class Acceptance:
    """What became of one row's proposals."""

    proposed: int
    accepted: int
    """Proposals that are in the output; what lay behind a stop is not."""
    passes: int
    """Forwards of the target, the one that read the prompt included; without a draft there is one per token."""

    @property
    def rate(self) -> float:
        """accepted / proposed; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True)
class Proposal:
    """Tokens that may come next."""

    tokens: list[int]
    q: list[Float[Tensor, "1 V"]] | None = None
    """The distribution each was drawn from; None: a point mass on it."""


class Proposer(Protocol):
    """Guesses at most `count` tokens after a row. `uniform` are the random numbers it may use, one per token."""

    def propose(self, row: list[int], count: int, uniform: list[float]) -> Proposal: ...


class Reader:
    """One row as a model has read it. Asked about another continuation, it goes back to where the two part."""

    native = False
    """Whether the compiled kernels read."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def logits(self, row: list[int], wanted: int) -> Float[Tensor, "T V"]:
        """Logits after each of the last `wanted` tokens of the row; only what is new is read, in one forward."""
        keep = min(len(self.held), len(row) - wanted)
        while self.held[:keep] != row[:keep]:
            keep -= 1
        logits = self._read(row, keep, wanted)
        self.held = list(row)
        return logits

    def _read(self, row: list[int], keep: int, wanted: int) -> Float[Tensor, "T V"]:
        raise NotImplementedError


class EngineReader(Reader):
    """Read by torch: through a cache, or everything again when there is none."""

    def __init__(self, model: DecoderLM, capacity: int, kind: CacheKind | None, slack: int, chunk: int | None):
        super().__init__()
        self.model, self.chunk = model, chunk
        self.cache = None if kind is None else model.new_cache(kind, capacity, slack)

    def _read(self, row: list[int], keep: int, wanted: int) -> Float[Tensor, "T V"]:
        if self.cache is not None:
            self.cache.crop(keep)
        new = torch.tensor([row if self.cache is None else row[keep:]], device=self.model.device)
        size = max(self.chunk, wanted) if self.chunk and self.cache is not None else new.shape[1]
        hidden = torch.cat([self.model.encode(part, cache=self.cache) for part in new.split(size, 1)], 1)
        return self.model.logits(hidden[:, -wanted:])[0]


class KernelReader(Reader):
    """Read by the compiled kernels, which let every row have its own length and keep what lies beyond unread."""

    native = True

    def __init__(self, decoder: NativeDecoder, index: int, chunk: int | None):
        super().__init__()
        self.decoder, self.index, self.chunk = decoder, index, chunk

    def _read(self, row: list[int], keep: int, wanted: int) -> Float[Tensor, "T V"]:
        self.decoder.lengths[self.index] = keep
        entries = [(token, self.index, place) for place, token in enumerate(row[keep:], keep)]
        size, first_wanted, logits = max(self.chunk or CHUNK, wanted), len(entries) - wanted, []
        for first in range(0, len(entries), size):
            part = torch.tensor(entries[first : first + size], dtype=torch.int32)
            begin = min(max(first_wanted - first, 0), len(part) - 1)  # the kernels give the logits of one at least
            logits.append(self.decoder._run(part, torch.arange(begin, len(part), dtype=torch.int32)))
        return logits[0] if len(logits) == 1 else torch.cat(logits)[-wanted:]


class Lookup:
    """Prompt lookup: proposes what followed the row's last 3 (else 2, else 1) tokens when they last stood in it before.

    Past the end of the row it goes on with its own proposals, so that a repetition of any period is continued. Saxena
    2023, "Prompt Lookup Decoding"; Yang et al. 2023 (arXiv:2304.04487).
    """

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        """Each n-gram seen to the place after it."""
        self.known = 0

    def propose(self, row: list[int], count: int, uniform: list[float]) -> Proposal:
        for end in range(self.known + 1, len(row)):  # the n-grams that end with the row are what is looked for
            for n in range(1, min(LONGEST, end) + 1):
                self.after[tuple(row[end - n : end])] = end
        self.known = max(self.known, len(row) - 1)
        for n in range(min(LONGEST, len(row)), 0, -1):
            place = self.after.get(tuple(row[-n:]))
            if place is not None:
                copied = list(row)
                for i in range(place, place + count):
                    copied.append(copied[i])
                return Proposal(copied[len(row) :])
        return Proposal([])


class DraftModel:
    """A smaller model of the same vocabulary, sampled in the same way, with a cache of its own."""

    def __init__(self, reader: Reader, sampling: Sampling):
        self.reader, self.sampling = reader, sampling

    def propose(self, row: list[int], count: int, uniform: list[float]) -> Proposal:
        tokens: list[int] = []
        q: list[Tensor] = []
        for u in uniform[:count]:
            logits = self.reader.logits(row + tokens, 1)
            with one_thread(self.reader.native):
                if self.sampling.temperature == 0:
                    tokens += choices(logits, self.sampling, row + tokens, [])
                else:
                    q += probabilities(logits, self.sampling, row + tokens, [])
                    tokens.append(_draw(q[-1], u))
        return Proposal(tokens, q or None)


def places(
    logits: Float[Tensor, "T V"], sampling: Sampling, row: list[int], proposed: list[int]
) -> Iterator[tuple[Float[Tensor, "1 V"], Bool[Tensor, "1 V"] | None]]:
    """Logits after the row, then after each proposal, with what the penalty counts there: all that stands before.

    One at a time, when asked for: what lies behind the first rejection is never looked at, and filtering a large
    vocabulary takes as long as a layer.
    """
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
        seen[0, row] = True
        seen = seen.to(logits.device)
    for place in range(len(logits)):
        if seen is not None and place:
            seen[0, proposed[place - 1]] = True
        yield logits[place : place + 1], seen


def probabilities(
    logits: Float[Tensor, "T V"], sampling: Sampling, row: list[int], proposed: list[int]
) -> Iterator[Float[Tensor, "1 V"]]:
    """p after the row and after each proposal."""
    return (distribution(here, sampling, seen) for here, seen in places(logits, sampling, row, proposed))


def choices(logits: Float[Tensor, "T V"], sampling: Sampling, row: list[int], proposed: list[int]) -> Iterator[int]:
    """At temperature 0: where p has its mass, by the function that picks without a draft, so with the same ties."""
    unused = logits.new_zeros(1)
    return (int(choose(here, sampling, unused, seen)) for here, seen in places(logits, sampling, row, proposed))


def accept_greedy(best: Iterator[int], proposal: Proposal) -> list[int]:
    """`accept` where p and q are point masses: a proposal is accepted or replaced by the model's choice."""
    gained: list[int] = []
    for token, proposed in zip(best, [*proposal.tokens, None], strict=False):
        gained.append(token)
        if token != proposed:
            break
    return gained


def accept(p: Iterator[Float[Tensor, "1 V"]], proposal: Proposal, uniform: list[float]) -> list[int]:
    """The proposals accepted, and one token more: the rule above. `uniform` has one number more than there are."""
    *each, last = uniform
    for i, (token, u) in enumerate(zip(proposal.tokens, each, strict=True)):
        ours = next(p)
        theirs = F.one_hot(torch.tensor([token]), ours.shape[1]) if proposal.q is None else proposal.q[i]
        theirs = theirs.to(ours)
        if u * float(theirs[0, token]) >= float(ours[0, token]):
            rest = (ours - theirs).clamp(min=0)
            # p and q that differ by rounding alone leave nothing over
            return [*proposal.tokens[:i], _draw(rest if bool(rest.any()) else ours, last)]
    return [*proposal.tokens, _draw(next(p), last)]


def _draw(p: Float[Tensor, "1 V"], u: float) -> int:
    return int(draw(p, torch.tensor([u], dtype=torch.float64, device=p.device)))


class Row:
    """One prompt being continued."""

    def __init__(self, prompt: list[int], reader: Reader, proposer: Proposer, draft_tokens: int, seed: int):
        self.tokens, self.new, self.ended = list(prompt), list[int](), False
        self.reader, self.proposer, self.draft_tokens = reader, proposer, draft_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.proposed = self.accepted = self.passes = 0

    def advance(self, sampling: Sampling, max_new_tokens: int, stops: list[list[int]]) -> None:
        """One pass of the target: at least one token more, at most `draft_tokens` + 1, none after a stop."""
        most = self.draft_tokens
        # as many in every pass, used or not: a row's draws depend on its own passes and on nothing else
        uniform = torch.rand(2 * most + 1, generator=self.generator, dtype=torch.float64).tolist()
        count = min(most, max_new_tokens - len(self.new) - 1)
        proposal = self.proposer.propose(self.tokens, count, uniform[:most])
        proposed = proposal.tokens
        logits = self.reader.logits(self.tokens + proposed, len(proposed) + 1)
        read = (logits, sampling, self.tokens, proposed)
        with one_thread(self.reader.native):
            if sampling.temperature == 0:
                gained = accept_greedy(choices(*read), proposal)
            else:
                gained = accept(probabilities(*read), proposal, uniform[most : most + len(proposed) + 1])
        self.passes, self.proposed = self.passes + 1, self.proposed + len(proposed)
        for place, token in enumerate(gained, 1):
            self.tokens.append(token)
            self.new.append(token)
            self.accepted += place < len(gained)
            self.ended = len(self.new) == max_new_tokens or ends_with(self.new, stops)
            if self.ended:
                break


class Speculation(Iterator[list[int | None]]):
    """The steps of a generation with a draft, as `stream` gives them, and how its proposals fared so far."""

    def __init__(
        self,
        models: Sequence[Model],
        rows: list[Row],
        sampling: Sampling,
        max_new_tokens: int,
        stops: list[list[int]],
        engine: Implementation,
    ):
        self.models, self.rows, self.limits = models, rows, (sampling, max_new_tokens, stops)
        self.engine = engine
        self.step, self.closed = 0, False

    def __next__(self) -> list[int | None]:
        step = self.step
        waiting = [row for row in self.rows if len(row.new) <= step and not row.ended]
        if self.closed or not (waiting or any(len(row.new) > step for row in self.rows)):
            raise StopIteration
        if waiting:
            # the modes are entered anew at each pass: between two tokens the caller's own code runs
            with evaluating(*self.models):
                for row in waiting:
                    row.advance(*self.limits)
        self.step += 1
        return [row.new[step] if len(row.new) > step else None for row in self.rows]

    def close(self) -> None:
        """Nothing more will come, as with a generator."""
        self.closed = True

    @property
    def acceptance(self) -> list[Acceptance]:
        return [Acceptance(row.proposed, row.accepted, row.passes) for row in self.rows]


def speculate(
    model: DecoderLM,
    draft: Draft,
    draft_tokens: int,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stops: list[list[int]],
    kind: CacheKind | None,
    chunk: int | None,
    engine: Engine,
    precision: Precision,
) -> Speculation:
    """Sequences are read one after another, each with a cache of its own: each gets exactly what it gets alone.

    `engine` and `precision` are the target's, and the draft's where the kernels support it: any q will do.
    """
    call = Call.of(model, kind, max_new_tokens, has_draft=True)
    chosen = choose_engine(call, engine, precision)
    try:
        model, readers = make_readers(model, prompts, max_new_tokens, kind, draft_tokens, chunk, chosen)
    except library.NativeError as error:
        chosen = fall_back(call, engine, precision, error)
        model, readers = make_readers(model, prompts, max_new_tokens, kind, draft_tokens, chunk, chosen)
    proposers: list[Proposer] = [Lookup() for _ in prompts]
    models = [model]
    if isinstance(draft, DecoderLM):
        held: CacheKind | None = None if kind is None else "static"
        by = _draft_engine(Call.of(draft, held, max_new_tokens, has_draft=True), chosen)
        draft, drafts = make_readers(draft, prompts, max_new_tokens, held, draft_tokens, chunk, by)
        models.append(draft)
        proposers = [DraftModel(reader, sampling) for reader in drafts]
    made = zip(prompts, readers, proposers, [draft_tokens] * len(prompts), seeds, strict=True)
    return Speculation(models, [Row(*row) for row in made], sampling, max_new_tokens, stops, chosen)


def _draft_engine(call: Call, target: Implementation) -> Implementation:
    """The target's implementation where it supports the draft; torch otherwise."""
    if target.engine == "native" and unsupported_by_kernels(call, target.precision) is None:
        return target
    return choose_engine(call, "torch", "auto")


def make_readers(
    model: DecoderLM,
    prompts: list[list[int]],
    new: int,
    kind: CacheKind | None,
    slack: int,
    chunk: int | None,
    chosen: Implementation,
) -> tuple[DecoderLM, list[Reader]]:
    """The model that is computed with, and a reader per prompt."""
    if chosen.engine == "native":
        decoder = NativeDecoder(model, len(prompts), max(map(len, prompts)) + new, chosen.precision)  # type: ignore[arg-type]
        return model, [KernelReader(decoder, index, chunk) for index in range(len(prompts))]
    model = in_precision(model, chosen)
    return model, [EngineReader(model, len(prompt) + new, kind, slack, chunk) for prompt in prompts]


def check_draft(model: Model, draft: object, draft_tokens: int, longest: int, max_new_tokens: int) -> None:
    """Refuse what cannot propose for this model, before any work is done."""
    if type(draft_tokens) is not int or draft_tokens < 1:
        raise ValueError(f"draft_tokens={draft_tokens} must be a whole number of at least 1.")
    if not isinstance(model, DecoderLM):
        raise ValueError("only a decoder-only model can be sped up by a draft, and this one is not: leave draft out.")
    if isinstance(draft, str) and draft == "lookup":
        return
    if not isinstance(draft, DecoderLM):
        what = repr(draft) if isinstance(draft, str) else f"a {type(draft).__name__}"
        raise ValueError(f"draft is {what}: give a decoder-only model, or 'lookup' to copy from the row itself.")
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(f"the draft knows {theirs} tokens and the model {ours}: they must share one vocabulary.")
    limit = draft.config.max_len
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the draft's context of {limit}: "
            "ask for fewer tokens, or take a draft that reads as far as the model."
        )
