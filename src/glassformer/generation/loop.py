"""Decoding: `stream` yields tokens as they come, `generate` collects them."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from glassformer.generation.beam import beam_search
from glassformer.generation.engine import (
    Call,
    Engine,
    Implementation,
    Precision,
    choose_engine,
    fall_back,
    in_precision,
)
from glassformer.generation.feed import (
    Feed,
    Prompts,
    check_length,
    ends_with,
    evaluating,
    is_text,
    one_thread,
    read_prompts,
)
from glassformer.generation.native_feed import NativeFeed
from glassformer.generation.sampling import GREEDY, Sampling, choose, require_numbers
from glassformer.generation.speculate import Acceptance, Draft, Speculation, check_draft, speculate
from glassformer.generation.tokenizer import tokenizer_of
from glassformer.kernels.cpu.decode import library
from glassformer.kernels.toolchain.nvrtc import CudaError
from glassformer.model import DecoderLM, Model, Seq2Seq
from glassformer.model.cache import CacheKind

Stop = int | Sequence[int | Sequence[int]] | None


class Generated(list[list[int]]):
    """One list of token ids per prompt: the prompt (an encoder-decoder: the start token) and the new tokens."""

    def __init__(
        self,
        rows: list[list[int]],
        prompt_lengths: list[int],
        finished: list[str],
        engine: Implementation,
        scores: list[float] | None = None,
        acceptance: list[Acceptance] | None = None,
        tokenizer: Any = None,
    ):
        super().__init__(rows)
        self.engine = engine
        """The implementation that ran: engine, device, precision, and why."""
        self.tokenizer = tokenizer
        self.prompt_lengths = prompt_lengths
        self.finished = finished
        """Why each row ended: "stop" or "length"."""
        self.scores = scores
        """Beam search only: log-probability of the continuation / its length ** length_penalty."""
        self.acceptance = acceptance
        """With a draft only: what became of its proposals, row by row."""

    @property
    def new(self) -> list[list[int]]:
        """The new tokens, without the prompts."""
        return [row[n:] for row, n in zip(self, self.prompt_lengths, strict=True)]

    @property
    def texts(self) -> list[str]:
        """The sequences as text, where the prompts were text."""
        if self.tokenizer is None:
            raise ValueError("the prompts were token ids: decode the result with your own tokenizer.")
        return [self.tokenizer.decode(row) for row in self]


class Steps(Iterator[list[int | None]]):
    """The steps of a generation, one list of tokens each, and the implementation that computes them."""

    def __init__(self, steps: Generator[list[int | None], None, None], engine: Implementation):
        self.steps, self.engine = steps, engine

    def __next__(self) -> list[int | None]:
        return next(self.steps)

    def close(self) -> None:
        self.steps.close()


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

    `engine` computes the steps: "torch", or "native", which are compiled kernels for a CPU or an NVIDIA GPU that give
    the same logits up to rounding. "auto" uses the kernels if they support the model, a compiler is there, and
    `max_new_tokens` is at least 32, so that compiling (about 5 s, once per machine) is worth it; otherwise it uses
    torch. The choice depends on the call and the machine alone, and `result.engine` reports it with its reason.

    `precision` is the number format of the weights while decoding. "auto" is exact: float32 on a CPU, the stored dtype
    on a GPU. int8 and int4 need the kernels and matrices whose number of columns is a multiple of 64; other matrices
    are kept in bfloat16.

    `draft` proposes `draft_tokens` tokens at a time, which the model checks in one pass (`generation/speculate.py`): a
    smaller decoder-only model of the same vocabulary, or "lookup", which copies what followed the last tokens where
    they occurred in the sequence before. Greedy output is the same (up to ties within rounding). Sampled output has the
    same distribution and is reproducible for a given seed, but differs from the output without a draft.
    """
    if type(beams) is not int or beams < 1:
        raise ValueError(f"beams={beams} must be a whole number of at least 1.")
    rows = read_prompts(model, prompts)
    tokenizer = tokenizer_of(model) if is_text(prompts) else None
    if beams == 1:
        given = (cache, seed, stop, prefill_chunk, engine, precision, draft, draft_tokens)
        steps = stream(model, rows, max_new_tokens, sampling, *given)
        return _collect(model, rows, steps, read_stop(model, stop), tokenizer)
    if draft is not None:
        raise ValueError(f"beam search follows many sequences and cannot use a draft: leave it out (beams={beams}).")
    check_length(model, rows, max_new_tokens)
    penalty = _beam_penalty(sampling, beams)
    with evaluating(model):
        feed, chosen = _feed(model, rows, max_new_tokens, cache, prefill_chunk, engine, precision, beams)
    with evaluating(feed.model):
        found = beam_search(feed, max_new_tokens, beams, length_penalty, read_stop(model, stop), penalty)
    whole = [row + best.tokens for row, best in zip(feed.rows, found, strict=True)]
    finished = ["stop" if best.stopped else "length" for best in found]
    scores = [best.score for best in found]
    return Generated(whole, [len(row) for row in feed.rows], finished, chosen, scores, tokenizer=tokenizer)


def _beam_penalty(sampling: Sampling | None, beams: int) -> float:
    """The repetition penalty, the only part of a sampling that beam search knows."""
    if sampling is None:
        return 1.0
    if sampling != Sampling(sampling.temperature, repetition_penalty=sampling.repetition_penalty):
        raise ValueError(f"beam search does not sample: drop top_k, top_p and min_p, or use beams=1 (beams={beams}).")
    if sampling.temperature not in (0.0, 1.0):
        raise ValueError(f"beam search does not sample: drop temperature={sampling.temperature}, or use beams=1.")
    return sampling.repetition_penalty


def stream(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    cache: bool | CacheKind = True,
    seed: int | Sequence[int] = 0,
    stop: Stop = None,
    prefill_chunk: int | None = None,
    engine: Engine = "auto",
    precision: Precision = "auto",
    draft: Draft | None = None,
    draft_tokens: int = 4,
) -> Steps | Speculation:
    """One list per step: the token each sequence gained, None for one that has ended. Arguments as for `generate`.

    The iterator has an attribute `engine`, the implementation that runs. With a draft it is a `Speculation`, whose
    `acceptance` counts what became of the proposals so far.
    """
    rows = read_prompts(model, prompts)
    check_length(model, rows, max_new_tokens)
    stops = read_stop(model, stop)
    sampling = sampling or GREEDY
    if draft is not None:
        check_draft(model, draft, draft_tokens, max(map(len, rows)), max_new_tokens)
        assert isinstance(model, DecoderLM)
        how = (_cache_kind(cache), _check_chunk(prefill_chunk), engine, precision)
        seeds = _seeds(seed, len(rows))
        with evaluating(model):
            return speculate(model, draft, draft_tokens, rows, max_new_tokens, sampling, seeds, stops, *how)
    uniform = uniforms(seed, len(rows), max_new_tokens)
    with evaluating(model):
        feed, chosen = _feed(model, rows, max_new_tokens, cache, prefill_chunk, engine, precision)
    return Steps(_stream(feed.model, feed, max_new_tokens, sampling, uniform, stops), chosen)


def _stream(
    model: Model,
    feed: Feed,
    max_new_tokens: int,
    sampling: Sampling,
    uniform: Tensor,
    stops: list[list[int]],
) -> Generator[list[int | None], None, None]:
    new: list[list[int]] = [[] for _ in feed.rows]
    ended = [False] * len(feed.rows)
    for tokens in _tokens(model, feed, max_new_tokens, sampling, uniform):
        gained: list[int | None] = []
        for i, token in enumerate(tokens):
            gained.append(None if ended[i] else token)
            if not ended[i]:
                new[i].append(token)
                ended[i] = ends_with(new[i], stops)
        yield gained
        if all(ended):
            return


def _tokens(model: Model, feed: Feed, max_new_tokens: int, sampling: Sampling, uniform: Tensor) -> Iterator[list[int]]:
    """A token for every row at each step, whatever has ended.

    Where a feed can choose the likeliest token itself, it goes on for as many steps as it has gone already: a GPU does
    not wait for Python then, the first tokens come at once, and a stop leaves at most half of the work unused.
    """
    with evaluating(model):
        seen = _seen(feed.rows, model) if sampling.repetition_penalty != 1 else None
        logits = feed.start()
        tokens = torch.empty(0)
    step, parts = 0, list(model.modules())
    while step < max_new_tokens:
        # the modes are entered anew at each step: between two tokens the caller's own code runs
        with evaluating(parts=parts):
            if step and sampling == GREEDY and hasattr(feed, "greedy"):
                steps = feed.greedy(tokens, min(step, LONGEST_RUN, max_new_tokens - step))
                tokens = torch.tensor(steps[-1], device=tokens.device)
            else:
                if step:
                    logits = feed.step(tokens)
                with one_thread(isinstance(feed, NativeFeed)):
                    tokens = choose(logits, sampling, uniform[:, step].to(logits.device), seen)
                    require_numbers(logits, tokens)
                if seen is not None:
                    seen.scatter_(1, tokens[:, None], True)
                steps = [tokens.tolist()]
        yield from steps
        step += len(steps)


LONGEST_RUN = 64
"""Steps that are taken without looking at what was said."""


def _collect(
    model: Model, prompts: list[list[int]], steps: Steps | Speculation, stops: list[list[int]], tokenizer: Any
) -> Generated:
    start = [[model.config.special.start or 0] for _ in prompts] if isinstance(model, Seq2Seq) else prompts
    new: list[list[int]] = [[] for _ in prompts]
    for gained in steps:
        for row, token in zip(new, gained, strict=True):
            if token is not None:
                row.append(token)
    finished = ["stop" if ends_with(row, stops) else "length" for row in new]
    acceptance = steps.acceptance if isinstance(steps, Speculation) else None
    whole = [a + b for a, b in zip(start, new, strict=True)]
    lengths = [len(row) for row in start]
    return Generated(whole, lengths, finished, steps.engine, acceptance=acceptance, tokenizer=tokenizer)


def _feed(
    model: Model,
    rows: list[list[int]],
    max_new_tokens: int,
    cache: bool | CacheKind,
    chunk: int | None,
    engine: Engine,
    precision: Precision,
    beams: int = 1,
) -> tuple[Feed, Implementation]:
    """The decode state of the chosen implementation; what `auto` chose and cannot be compiled is replaced by torch."""
    assert isinstance(model, DecoderLM | Seq2Seq)  # read_prompts refused the rest
    chunk, kind = _check_chunk(chunk), _cache_kind(cache)
    call = Call.of(model, kind, max_new_tokens, beams)
    chosen = choose_engine(call, engine, precision)
    if chosen.engine == "native":
        assert isinstance(model, DecoderLM)
        try:
            return _native_feed(model, rows, max_new_tokens, chunk, chosen), chosen
        except (library.NativeError, CudaError) as error:
            chosen = fall_back(call, engine, precision, error)
    return Feed(in_precision(model, chosen), rows, max_new_tokens, kind, chunk), chosen


def _native_feed(model: DecoderLM, rows: list[list[int]], new: int, chunk: int | None, chosen: Implementation) -> Feed:
    if chosen.device == "cuda":
        from glassformer.generation.cuda_feed import CudaFeed

        return CudaFeed(model, rows, new, chunk, chosen.precision)
    return NativeFeed(model, rows, new, chunk, chosen.precision)  # type: ignore[arg-type]


def _check_chunk(chunk: int | None) -> int | None:
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"prefill_chunk={chunk} must be a whole number of at least 1.")
    return chunk


def _cache_kind(cache: bool | CacheKind) -> CacheKind | None:
    return "static" if cache is True else None if cache is False else cache


def uniforms(seed: int | Sequence[int], rows: int, steps: int) -> Tensor:
    """(rows, steps) uniform numbers in [0, 1): one seed gives every row the same stream, a list one to each."""
    each = [torch.Generator().manual_seed(s) for s in _seeds(seed, rows)]
    return torch.stack([torch.rand(steps, generator=generator, dtype=torch.float64) for generator in each])


def _seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    seeds = [seed] * rows if isinstance(seed, int) else list(seed)
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds were given for {rows} prompts: give one number, or one per prompt.")
    return seeds


def read_stop(model: Model, stop: Stop) -> list[list[int]]:
    """Stop sequences as lists of ids."""
    if stop is None:
        stop = list(model.config.special.eos)
    if isinstance(stop, int):
        stop = [stop]
    sequences = [[s] if isinstance(s, int) else list(s) for s in stop]
    if any(not s for s in sequences):
        raise ValueError("a stop sequence is empty: it would end every row at once.")
    return sequences


def _seen(rows: list[list[int]], model: Model) -> Tensor:
    """(B,V): which tokens each row already holds; padding does not count."""
    seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, row] = True
    return seen.to(model.device)
