"""Decoding: `stream` yields tokens as they come, `generate` collects them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import Tensor

from glassformer.generation.beam import BeamSettings, beam_search
from glassformer.generation.engine import Implementation, make_state
from glassformer.generation.request import (
    Draft,
    Engine,
    GenerationRequest,
    Options,
    Precision,
    Prompts,
    Stop,
    is_text,
    read_request,
    read_seeds,
    tokenizer_of,
)
from glassformer.generation.sampling import GREEDY, Sampling, checked, choose
from glassformer.generation.speculate import Acceptance, Speculation, speculate
from glassformer.generation.state import DecodeState, ends_with, evaluating, one_thread, without_gradients
from glassformer.model import Model
from glassformer.model.cache import CacheKind
from glassformer.shapes import Bool, Float, Int


class Generated(list[list[int]]):
    """One list of token ids per prompt: the prompt (an encoder-decoder: the start token) and the new tokens."""

    def __init__(
        self,
        sequences: list[list[int]],
        prompt_lengths: list[int],
        finished: list[str],
        engine: Implementation,
        scores: list[float] | None = None,
        acceptance: list[Acceptance] | None = None,
        tokenizer: Any = None,
    ):
        super().__init__(sequences)
        self.engine = engine
        """The implementation that ran: engine, device, precision, and why."""
        self.tokenizer = tokenizer
        self.prompt_lengths = prompt_lengths
        self.finished = finished
        """Why each sequence ended: "stop" or "length"."""
        self.scores = scores
        """Beam search only: log-probability of the continuation / its length ** length_penalty."""
        self.acceptance = acceptance
        """With a draft only: what became of its proposals, one entry per sequence."""

    @property
    def new(self) -> list[list[int]]:
        """The new tokens, without the prompts."""
        return [tokens[n:] for tokens, n in zip(self, self.prompt_lengths, strict=True)]

    @property
    def texts(self) -> list[str]:
        """The sequences as text, where the prompts were text."""
        if self.tokenizer is None:
            raise ValueError("the prompts were token ids: decode the result with your own tokenizer.")
        return [self.tokenizer.decode(tokens) for tokens in self]


LONGEST_RUN = 32
"""Largest number of steps that a kernel takes before its tokens are looked at."""
RUNS_AHEAD = 1
"""Runs that are begun before the tokens of the run before them are known: a GPU need not wait for Python."""


class Steps(Iterator[list[int | None]]):
    """The steps of a generation: the token that each sequence gained, None for one that has ended."""

    def __init__(self, state: DecodeState, request: GenerationRequest, engine: Implementation):
        self.state, self.request, self.engine = state, request, engine
        self.constraints = request.constraints
        self.is_greedy = request.sampling == GREEDY and self.constraints is None
        """True if each token is the most likely one, whatever was generated before."""
        self.new: list[list[int]] = [[] for _ in request.prompts]
        self.ended = [False] * len(request.prompts)
        self.tokens = torch.empty(0, dtype=torch.long)
        self.step = 0
        """The number of steps that are computed."""
        self.started = 0
        """The number of steps that are computed or begun."""
        self.waiting: deque[list[int | None]] = deque()
        """Steps that are computed but not yet returned."""
        self.begun: deque[Callable[[], list[list[int]]]] = deque()
        """Runs of steps that a GPU computes already. Each function waits for the tokens of a run."""

    def __next__(self) -> list[int | None]:
        """Return the next step.

        A state that can begin several steps computes runs of as many steps as there were before, up to LONGEST_RUN: the
        first tokens come at once. The next run is begun before the tokens of a run are known, so a GPU does not wait
        for Python. A stop wastes what is begun: the rest of its run and the next one.
        """
        if self.waiting:
            return self.waiting.popleft()
        if self._is_over():
            raise StopIteration
        many = self.step > 0 and self.state.begin is not None
        # the modes are set at each step: between two tokens the caller's own code runs
        with evaluating(parts=self.state.modules):
            if many:
                self._begin()
                found = self.begun.popleft()()
            else:
                logits = self.state.step(self.tokens) if self.step else self.state.start()
                found = [self._choose(logits)]
                self.started += 1
            self.step += len(found)
            for tokens in found:
                if not all(self.ended):
                    self.waiting.append([self._gain(i, token) for i, token in enumerate(tokens)])
            if self._is_over():
                self.begun.clear()
            elif many:
                self._begin()
        return self.waiting.popleft()

    @cached_property
    def uniform(self) -> Float[Tensor, "B N"] | None:
        """Uniform numbers for all steps, drawn at once while a GPU reads the prompts. The host does not wait for it."""
        if not self.request.sampling.temperature:
            return None
        draws = uniforms(self.request.seeds, len(self.request.prompts), self.request.max_new_tokens)
        return draws.to(self.state.model.device, non_blocking=True)

    @cached_property
    def seen(self) -> Bool[Tensor, "B V"] | None:
        """The tokens that each sequence has so far, for a penalty on repetition."""
        return _seen(self.state) if self.request.sampling.repetition_penalty != 1 else None

    def close(self) -> None:
        """End the generation: no step follows."""
        self.ended = [True] * len(self.ended)
        self.waiting.clear()
        self.begun.clear()

    def _is_over(self) -> bool:
        return all(self.ended) or self.step == self.request.max_new_tokens

    def _begin(self) -> None:
        """Begin runs of steps, until enough of them are ahead of the one whose tokens are awaited."""
        assert self.state.begin is not None
        while len(self.begun) <= RUNS_AHEAD and self.started < self.request.max_new_tokens:
            count = min(self.started, LONGEST_RUN, self.request.max_new_tokens - self.started)
            how = None if self.is_greedy else partial(self._choose_in_run, self.started)
            self.begun.append(self.state.begin(self.tokens if self.started == 1 else None, count, how))
            self.started += count

    def _choose(self, logits: Float[Tensor, "B V"]) -> list[int]:
        """Choose the next `tokens` and return them as a list."""
        with one_thread(self.state.owns_threads):
            self.tokens, logits = self._pick(logits, self.step)
            return checked(logits, self.tokens)

    def _choose_in_run(self, first: int, logits: Float[Tensor, "B V"], index: int) -> Int[Tensor, "B"]:
        return self._pick(logits, first + index)[0]

    def _pick(self, logits: Float[Tensor, "B V"], step: int) -> tuple[Int[Tensor, "B"], Float[Tensor, "B V"]]:
        """Return the next tokens and the logits that they were chosen from. The host does not wait for a GPU."""
        if self.constraints is not None:
            logits = self.constraints.apply(logits, step)
        uniform = None if self.uniform is None else self.uniform[:, step]
        tokens = choose(logits, self.request.sampling, uniform, self.seen)
        if self.seen is not None:
            self.seen.scatter_(1, tokens.clamp(max=logits.shape[-1] - 1)[:, None], True)
        return tokens, logits

    def _gain(self, i: int, token: int) -> int | None:
        """Append a token to sequence i, unless the sequence has ended."""
        if self.ended[i]:
            return None
        self.new[i].append(token)
        self.ended[i] = ends_with(self.new[i], self.request.stops)
        return token


def generate(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    beams: int = 1,
    cache: bool | CacheKind = True,
    seed: int | Sequence[int] = 0,
    stop: Stop = None,
    length_penalty: float = 1.0,
    prefill_chunk: int | None = None,
    engine: Engine = "auto",
    precision: Precision = "auto",
    draft: Draft | None = None,
    draft_tokens: int = 4,
) -> Generated:
    """Continue each prompt. Greedy unless `sampling` is given; beam search when `beams` > 1.

    `prompts` are lists of token ids, a (batch, length) tensor of them, or one text or a list of texts if the model was
    loaded from a folder with a tokenizer; the result then also has `texts`. Prompts may have unequal lengths: each
    sequence gets what it would get alone. One `seed` is used by every sequence, so its draws do not depend on the
    others either; a list gives one seed per sequence. `stop` is a token id, or a list of ids and id sequences; the
    first that is produced ends a sequence and is kept. None means the config's end-of-text ids; an empty list never
    stops. `cache` may name a kind; False recomputes everything.

    `engine` computes the steps: "torch", or "native", which are compiled kernels for a CPU and, on a GPU, kernels and
    captured CUDA graphs for every model; they give the same logits up to rounding. "auto" uses them if they support the
    model, a CPU has a compiler, and `max_new_tokens` is at least 32, so that compiling (some seconds, once per machine)
    is worth it; otherwise it uses torch. The choice depends on the call and the machine alone, and `result.engine`
    reports it with its reason.

    `precision` is the number format of the weights while decoding. "auto" is exact: float32 on a CPU, the stored dtype
    on a GPU. int8 and int4 need the kernels of a CPU and matrices whose number of columns is a multiple of 64; other
    matrices are kept in bfloat16. int8 and fp8 are for GPUs too, with one scale per row.

    `draft` proposes `draft_tokens` tokens at a time, which the model checks in one pass (`generation/speculate.py`): a
    smaller decoder-only model of the same vocabulary, or "lookup", which copies what followed the last tokens where
    they occurred in the sequence before. Greedy output is the same (up to ties within rounding). Sampled output has the
    same distribution and is reproducible for a given seed, but differs from the output without a draft.

    >>> gf.generate(gf.load("bard"), "ROMEO:", max_new_tokens=9).texts[0]
    'ROMEO:\\nThe sea '
    """
    request = read_request(
        model, prompts, max_new_tokens, beams=beams, sampling=sampling, cache=cache, seed=seed, stop=stop,
        prefill_chunk=prefill_chunk, engine=engine, precision=precision, draft=draft, draft_tokens=draft_tokens,
    )  # fmt: skip
    tokenizer = tokenizer_of(model) if is_text(prompts) else None
    if beams == 1:
        return _collect(_steps(model, request), request, tokenizer)
    penalty = _beam_penalty(sampling, beams)
    with without_gradients():
        state, chosen = make_state(model, request)
    with evaluating(state.model):
        settings = BeamSettings(beams, max_new_tokens, request.stops, length_penalty, penalty, request.special)
        found = beam_search(state, settings)
    whole = [prompt + best.tokens for prompt, best in zip(state.prompts, found, strict=True)]
    finished = ["stop" if best.stopped else "length" for best in found]
    scores = [best.score for best in found]
    return Generated(whole, list(map(len, state.prompts)), finished, chosen, scores, tokenizer=tokenizer)


def _beam_penalty(sampling: Sampling | None, beams: int) -> float:
    """Return the repetition penalty, the only part of a sampling that beam search uses."""
    if sampling is None:
        return 1.0
    if sampling != Sampling(sampling.temperature, repetition_penalty=sampling.repetition_penalty):
        raise ValueError(f"beam search does not sample: drop top_k, top_p and min_p, or use beams=1 (beams={beams}).")
    if sampling.temperature not in (0.0, 1.0):
        raise ValueError(f"beam search does not sample: drop temperature={sampling.temperature}, or use beams=1.")
    return sampling.repetition_penalty


def stream(model: Model, prompts: Prompts, max_new_tokens: int = 64, **options: Unpack[Options]) -> Steps | Speculation:
    """One list per step: the token each sequence gained, None for one that has ended. Arguments as for `generate`.

    The iterator has an attribute `engine`, the implementation that runs. With a draft it is a `Speculation`, whose
    `acceptance` counts what became of the proposals so far.

    >>> [new for new in gf.stream(gf.load("bard"), [[1, 2, 3]], 4)]
    [[53], [59], [56], [52]]
    """
    return _steps(model, read_request(model, prompts, max_new_tokens, **options))


def _steps(model: Model, request: GenerationRequest) -> Steps | Speculation:
    with without_gradients():  # nothing is computed yet: each step switches dropout off
        if request.draft is not None:
            return speculate(model, request)
        state, chosen = make_state(model, request)
        return Steps(state, request, chosen)


def _collect(steps: Steps | Speculation, request: GenerationRequest, tokenizer: Any) -> Generated:
    new: list[list[int]] = [[] for _ in request.prompts]
    for gained in steps:
        for tokens, token in zip(new, gained, strict=True):
            if token is not None:
                tokens.append(token)
    finished = ["stop" if ends_with(tokens, request.stops) else "length" for tokens in new]
    acceptance = steps.acceptance if isinstance(steps, Speculation) else None
    start = request.prompts if isinstance(steps, Speculation) else steps.state.prompts
    whole = [a + b for a, b in zip(start, new, strict=True)]
    return Generated(whole, list(map(len, start)), finished, steps.engine, acceptance=acceptance, tokenizer=tokenizer)


def uniforms(seed: int | Sequence[int], sequences: int, steps: int) -> Float[Tensor, "B N"]:
    """Return uniform numbers in [0, 1), one per sequence and step: one seed for all sequences, or one for each."""
    each = [torch.Generator().manual_seed(s) for s in read_seeds(seed, sequences)]
    return torch.stack([torch.rand(steps, generator=generator, dtype=torch.float64) for generator in each])


def _seen(state: DecodeState) -> Bool[Tensor, "B V"]:
    """Return which tokens each sequence already has; padding does not count."""
    seen = torch.zeros(len(state.prompts), state.model.config.vocab_size, dtype=torch.bool)
    for i, prompt in enumerate(state.prompts):
        seen[i, prompt] = True
    return seen.to(state.model.device, non_blocking=True)
