"""Speculative decoding: a cheap draft proposes k tokens, and the model checks them all in one forward pass.

Leviathan, Kalman and Matias 2023 (arXiv:2211.17192, algorithm 1) and Chen et al. 2023 (arXiv:2302.01318, algorithm 2).
Proposal x_i was drawn from q_i; one forward pass over k + 1 positions gives p_1 before x_1 to p_{k+1} after x_k.
In order, x_i is accepted with probability

    min(1, p_i(x_i) / q_i(x_i));

at the first rejection, one token is drawn from  max(0, p_i - q_i) / sum_y max(0, p_i(y) - q_i(y))  instead, and the
pass ends; if all are accepted, one more is drawn from p_{k+1}. Every pass gains 1 to k + 1 tokens, and each of them
has the distribution p, whatever q is: q(x) min(1, p(x)/q(x)) = min(p(x), q(x)), a rejection has the probability
1 - sum_y min(p(y), q(y)) = sum_y max(0, p(y) - q(y)), and min(p, q) + max(0, p - q) = p.

p and q are what `Sampling` makes of the logits, where the repetition penalty at position i counts the proposals before
it. At temperature 0 both are point masses: a proposal is accepted if it is the model's own choice.

`Cache.crop` removes the keys and values of rejected tokens before the next pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.errors import GlassformerError
from glassformer.generation.engine import Call, Implementation, choose_engine, fall_back, in_precision
from glassformer.generation.request import GenerationRequest
from glassformer.generation.sampling import Sampling, choose, distribution, draw
from glassformer.generation.state import ends_with, evaluating, one_thread
from glassformer.model import DecoderLM, Model
from glassformer.model.cache import CacheKind
from glassformer.shapes import Bool, Float

LONGEST = 3
"""Length of the longest suffix that prompt lookup looks for."""


@dataclass(frozen=True)
class Acceptance:
    """What became of the proposals for one sequence."""

    proposed: int
    accepted: int
    """Proposals that are in the output; those after a stop are not."""
    passes: int
    """Forward passes of the target, including the one over the prompt; without a draft there is one per token."""

    @property
    def rate(self) -> float:
        """accepted / proposed; 0 if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True)
class Proposal:
    """Tokens that may come next."""

    tokens: list[int]
    q: list[Float[Tensor, "1 V"]] | None = None
    """The distribution that each was drawn from. None: a point mass on the token."""


class Proposer(Protocol):
    """Proposes at most `count` tokens after a sequence. `uniform` has one random number for each of them."""

    def propose(self, tokens: list[int], count: int, uniform: list[float]) -> Proposal: ...


class Reader:
    """One sequence as a model has read it. For another continuation, it goes back to where the two differ."""

    owns_threads = False
    """True: it computes in CPU threads of its own, so torch should use one thread between the passes."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def logits(self, tokens: list[int], wanted: int) -> Float[Tensor, "T V"]:
        """Return the logits after each of the last `wanted` tokens. Only what is new is read, in one forward pass."""
        keep = min(len(self.held), len(tokens) - wanted)
        while self.held[:keep] != tokens[:keep]:
            keep -= 1
        logits = self._read(tokens, keep, wanted)
        self.held = list(tokens)
        return logits

    def _read(self, tokens: list[int], keep: int, wanted: int) -> Float[Tensor, "T V"]:
        raise NotImplementedError


class TorchReader(Reader):
    """Read by torch: through a cache, or everything again if there is none."""

    def __init__(self, model: DecoderLM, capacity: int, kind: CacheKind | None, slack: int, chunk: int | None):
        super().__init__()
        self.model, self.chunk = model, chunk
        self.cache = None if kind is None else model.new_cache(kind, capacity, slack)

    def _read(self, tokens: list[int], keep: int, wanted: int) -> Float[Tensor, "T V"]:
        if self.cache is not None:
            self.cache.crop(keep)
        new = torch.tensor([tokens if self.cache is None else tokens[keep:]], device=self.model.device)
        size = max(self.chunk, wanted) if self.chunk and self.cache is not None else new.shape[1]
        hidden = torch.cat([self.model.encode(part, cache=self.cache) for part in new.split(size, 1)], 1)
        return self.model.logits(hidden[:, -wanted:])[0]


class KernelReader(Reader):
    """Read by a compiled kernel, whose sequences have lengths of their own."""

    def __init__(self, decoder: Any, index: int, chunk: int | None):
        super().__init__()
        self.decoder, self.index, self.chunk = decoder, index, chunk
        self.owns_threads = decoder.owns_threads

    def _read(self, tokens: list[int], keep: int, wanted: int) -> Float[Tensor, "T V"]:
        logits: Tensor = self.decoder.extend(self.index, keep, tokens[keep:], wanted, self.chunk)
        return logits


class Lookup:
    """Prompt lookup: propose what followed the last 3 (else 2, else 1) tokens at their previous occurrence.

    Past the end of the sequence it continues with its own proposals, so that a repetition of any period is continued.
    Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023 (arXiv:2304.04487).
    """

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        """Each n-gram seen so far, and the index of the token after it."""
        self.known = 0

    def propose(self, tokens: list[int], count: int, uniform: list[float]) -> Proposal:
        for end in range(self.known + 1, len(tokens)):  # the n-grams at the end of the sequence are looked up below
            for n in range(1, min(LONGEST, end) + 1):
                self.after[tuple(tokens[end - n : end])] = end
        self.known = max(self.known, len(tokens) - 1)
        for n in range(min(LONGEST, len(tokens)), 0, -1):
            index = self.after.get(tuple(tokens[-n:]))
            if index is not None:
                copied = list(tokens)
                for i in range(index, index + count):
                    copied.append(copied[i])
                return Proposal(copied[len(tokens) :])
        return Proposal([])


class DraftModel:
    """A smaller model of the same vocabulary, sampled in the same way, with a cache of its own."""

    def __init__(self, reader: Reader, sampling: Sampling):
        self.reader, self.sampling = reader, sampling

    def propose(self, tokens: list[int], count: int, uniform: list[float]) -> Proposal:
        proposed: list[int] = []
        q: list[Tensor] = []
        for u in uniform[:count]:
            logits = self.reader.logits(tokens + proposed, 1)
            with one_thread(self.reader.owns_threads):
                if self.sampling.temperature == 0:
                    proposed += choices(logits, self.sampling, tokens + proposed, [])
                else:
                    q += probabilities(logits, self.sampling, tokens + proposed, [])
                    proposed.append(_draw(q[-1], u))
        return Proposal(proposed, q or None)


def each_position(
    logits: Float[Tensor, "T V"], sampling: Sampling, tokens: list[int], proposed: list[int]
) -> Iterator[tuple[Float[Tensor, "1 V"], Bool[Tensor, "1 V"] | None]]:
    """Yield the logits after the sequence, then after each proposal, and the tokens that the repetition penalty counts.

    Lazily: positions after the first rejection are never looked at, and filtering a large vocabulary takes as long as a
    layer.
    """
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
        seen[0, tokens] = True
        seen = seen.to(logits.device)
    for position in range(len(logits)):
        if seen is not None and position:
            seen[0, proposed[position - 1]] = True
        yield logits[position : position + 1], seen


def probabilities(
    logits: Float[Tensor, "T V"], sampling: Sampling, tokens: list[int], proposed: list[int]
) -> Iterator[Float[Tensor, "1 V"]]:
    """Yield p after the sequence and after each proposal."""
    return (distribution(here, sampling, seen) for here, seen in each_position(logits, sampling, tokens, proposed))


def choices(logits: Float[Tensor, "T V"], sampling: Sampling, tokens: list[int], proposed: list[int]) -> Iterator[int]:
    """Yield the tokens chosen at temperature 0, by the function that chooses without a draft, so with the same ties."""
    return (int(choose(here, sampling, None, seen)) for here, seen in each_position(logits, sampling, tokens, proposed))


def accept_greedy(best: Iterator[int], proposal: Proposal) -> list[int]:
    """Do `accept` for point masses p and q: a proposal is accepted, or replaced by the choice of the model."""
    gained: list[int] = []
    for token, proposed in zip(best, [*proposal.tokens, None], strict=False):
        gained.append(token)
        if token != proposed:
            break
    return gained


def accept(p: Iterator[Float[Tensor, "1 V"]], proposal: Proposal, uniform: list[float]) -> list[int]:
    """Return the accepted proposals and one more token, by the rule above. `uniform` has one number for each."""
    *each, last = uniform
    for i, (token, u) in enumerate(zip(proposal.tokens, each, strict=True)):
        ours = next(p)
        theirs = F.one_hot(torch.tensor([token]), ours.shape[1]) if proposal.q is None else proposal.q[i]
        theirs = theirs.to(ours)
        if u * float(theirs[0, token]) >= float(ours[0, token]):
            rest = (ours - theirs).clamp(min=0)
            # if p and q differ by rounding alone, p - q may have no positive entry
            return [*proposal.tokens[:i], _draw(rest if bool(rest.any()) else ours, last)]
    return [*proposal.tokens, _draw(next(p), last)]


def _draw(p: Float[Tensor, "1 V"], u: float) -> int:
    return int(draw(p, torch.tensor([u], dtype=torch.float64, device=p.device)))


class DraftedSequence:
    """One prompt that is being continued."""

    def __init__(self, prompt: list[int], seed: int, reader: Reader, proposer: Proposer, request: GenerationRequest):
        self.tokens, self.new, self.ended = list(prompt), list[int](), False
        self.reader, self.proposer, self.request = reader, proposer, request
        self.generator = torch.Generator().manual_seed(seed)
        self.proposed = self.accepted = self.passes = 0

    def advance(self) -> None:
        """Run one pass of the target: gain 1 to `draft_tokens` + 1 tokens, none after a stop."""
        sampling, most = self.request.sampling, self.request.draft_tokens
        # the same number in every pass, used or not: the draws of a sequence depend on nothing but its own passes
        uniform = torch.rand(2 * most + 1, generator=self.generator, dtype=torch.float64).tolist()
        count = min(most, self.request.max_new_tokens - len(self.new) - 1)
        proposal = self.proposer.propose(self.tokens, count, uniform[:most])
        proposed = proposal.tokens
        logits = self.reader.logits(self.tokens + proposed, len(proposed) + 1)
        with one_thread(self.reader.owns_threads):
            if sampling.temperature == 0:
                gained = accept_greedy(choices(logits, sampling, self.tokens, proposed), proposal)
            else:
                p = probabilities(logits, sampling, self.tokens, proposed)
                gained = accept(p, proposal, uniform[most : most + len(proposed) + 1])
        self.passes, self.proposed = self.passes + 1, self.proposed + len(proposed)
        for number, token in enumerate(gained, 1):
            self.tokens.append(token)
            self.new.append(token)
            self.accepted += number < len(gained)
            self.ended = len(self.new) == self.request.max_new_tokens or ends_with(self.new, self.request.stops)
            if self.ended:
                break


class Speculation(Iterator[list[int | None]]):
    """The steps of a generation with a draft, as `stream` returns them, and the acceptance of its proposals so far."""

    def __init__(self, models: Sequence[Model], sequences: list[DraftedSequence], engine: Implementation):
        self.models, self.sequences, self.engine = models, sequences, engine
        self.step, self.closed = 0, False

    def __next__(self) -> list[int | None]:
        step = self.step
        waiting = [one for one in self.sequences if len(one.new) <= step and not one.ended]
        if self.closed or not (waiting or any(len(one.new) > step for one in self.sequences)):
            raise StopIteration
        if waiting:
            # the modes are set at each pass: between two tokens the caller's own code runs
            with evaluating(*self.models):
                for one in waiting:
                    one.advance()
        self.step += 1
        return [one.new[step] if len(one.new) > step else None for one in self.sequences]

    def close(self) -> None:
        """End the generation: no step follows."""
        self.closed = True

    @property
    def acceptance(self) -> list[Acceptance]:
        return [Acceptance(one.proposed, one.accepted, one.passes) for one in self.sequences]


def speculate(model: Model, request: GenerationRequest) -> Speculation:
    """Start a generation with a draft. Each sequence has a cache of its own and gets exactly what it gets alone.

    The engine and precision of the target are also used for the draft if the kernels support it: any q will do.
    """
    assert isinstance(model, DecoderLM)  # check_draft refused any other model
    call = Call.of(model, request)
    chosen = choose_engine(call, request.engine, request.precision)
    try:
        model, readers = make_readers(model, request, chosen)
    except GlassformerError as error:
        if chosen.kernel is None:
            raise
        chosen = fall_back(call, request, error)
        model, readers = make_readers(model, request, chosen)
    proposers: list[Proposer] = [Lookup() for _ in request.prompts]
    models = [model]
    if isinstance(request.draft, DecoderLM):
        drafting = replace(request, cache=None if request.cache is None else "static")
        engine = _draft_engine(Call.of(request.draft, drafting), chosen)
        draft, draft_readers = make_readers(request.draft, drafting, engine)
        models.append(draft)
        proposers = [DraftModel(reader, request.sampling) for reader in draft_readers]
    parts = zip(request.prompts, request.seeds, readers, proposers, strict=True)
    return Speculation(models, [DraftedSequence(*part, request) for part in parts], chosen)


def _draft_engine(call: Call, target: Implementation) -> Implementation:
    """Return the implementation of the target if it supports the draft, otherwise torch."""
    if target.kernel is not None and target.kernel.supports(replace(call, precision=target.precision)) is None:
        return target
    return choose_engine(call, "torch", "auto")


def make_readers(
    model: DecoderLM, request: GenerationRequest, chosen: Implementation
) -> tuple[DecoderLM, list[Reader]]:
    """Return the model that computes, and a reader per prompt."""
    chunk = request.prefill_chunk
    if chosen.kernel is not None and chosen.kernel.make is not None:
        decoder = chosen.kernel.make(model, len(request.prompts), request.capacity, chosen.precision)
        return model, [KernelReader(decoder, index, chunk) for index in range(len(request.prompts))]
    model = in_precision(model, getattr(torch, chosen.precision))
    capacities = [len(prompt) + request.max_new_tokens for prompt in request.prompts]
    slack = request.draft_tokens
    return model, [TorchReader(model, capacity, request.cache, slack, chunk) for capacity in capacities]
