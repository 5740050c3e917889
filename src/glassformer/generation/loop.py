"""Decoding: `stream` yields tokens as they come, `generate` collects them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from glassformer.generation.beam import beam_search
from glassformer.generation.feed import Feed, Prompts, check_length, ends_with, evaluating, one_thread, read_prompts
from glassformer.generation.native_feed import NativeFeed
from glassformer.generation.sampling import GREEDY, Sampling, choose, require_numbers
from glassformer.generation.speculate import Acceptance, Draft, Speculation, check_draft, speculate
from glassformer.kernels.cpu.decode.choice import Engine, choose_engine
from glassformer.kernels.cpu.decode.pack import Precision
from glassformer.model import DecoderLM, Model, Seq2Seq
from glassformer.model.cache import CacheKind

Stop = int | Sequence[int | Sequence[int]] | None


class Generated(list[list[int]]):
    """One list of ids per prompt: the prompt (an encoder-decoder: the start token) and what was added to it."""

    def __init__(
        self,
        rows: list[list[int]],
        prompt_lengths: list[int],
        finished: list[str],
        scores: list[float] | None = None,
        acceptance: list[Acceptance] | None = None,
    ):
        super().__init__(rows)
        self.prompt_lengths = prompt_lengths
        self.finished = finished
        """Why each row ended: "stop" or "length"."""
        self.scores = scores
        """Beam search only: log-probability of the continuation / its length ** length_penalty."""
        self.acceptance = acceptance
        """With a draft only: what became of its proposals, row by row."""

    @property
    def new(self) -> list[list[int]]:
        """What was added, without the prompts."""
        return [row[n:] for row, n in zip(self, self.prompt_lengths, strict=True)]


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
    precision: Precision = "float32",
    draft: Draft | None = None,
    draft_tokens: int = 4,
) -> Generated:
    """Continue each prompt. Greedy unless `sampling` is given; beam search when `beams` > 1.

    Prompts may have unequal lengths: each row gets what it would get alone, whatever stands beside it. One `seed` is
    used by every row, so a row's draws do not depend on its neighbours either; a list gives one seed per row.
    `stop` is a token id, or a list of ids and id sequences; a row ends after the first it produces, which is kept. None
    means the config's end-of-text ids; an empty list never stops. `cache` may name a kind; False recomputes everything.

    `engine` is what computes the steps: torch, or native, compiled kernels for a CPU, which give the same logits up to
    rounding. auto is native where the kernels are built and know the model; a `precision` of the weights other than
    float32 needs them. int8 and int4 are for matrices whose rows are whole 64 columns: others are kept in bfloat16.

    `draft` proposes `draft_tokens` tokens at a time, which the model judges in one pass (`generation/speculate.py`): a
    smaller decoder-only model of the same vocabulary, or "lookup", which copies what followed the last tokens when they
    stood in the row before. Tokens keep their distribution: greedy output is the same (up to ties within rounding),
    sampled output is repeated by the same `seed` but drawn otherwise than without a draft. Rows are then read one after
    another.
    """
    if type(beams) is not int or beams < 1:
        raise ValueError(f"beams={beams} must be a whole number of at least 1.")
    if beams == 1:
        given = (cache, seed, stop, prefill_chunk, engine, precision, draft, draft_tokens)
        steps = stream(model, prompts, max_new_tokens, sampling, *given)
        return _collect(model, read_prompts(model, prompts), steps, read_stop(model, stop))
    if draft is not None:
        raise ValueError(f"beam search follows many rows and has no use for a draft: leave it out (beams={beams}).")
    rows = read_prompts(model, prompts)
    check_length(model, rows, max_new_tokens)
    penalty = _beam_penalty(sampling, beams)
    with evaluating(model):
        feed = _feed(model, rows, max_new_tokens, cache, prefill_chunk, engine, precision, beams)
        found = beam_search(feed, max_new_tokens, beams, length_penalty, read_stop(model, stop), penalty)
    return Generated(
        [row + best.tokens for row, best in zip(feed.rows, found, strict=True)],
        [len(row) for row in feed.rows],
        ["stop" if best.stopped else "length" for best in found],
        [best.score for best in found],
    )


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
    precision: Precision = "float32",
    draft: Draft | None = None,
    draft_tokens: int = 4,
) -> Iterator[list[int | None]]:
    """One list per step: the token each row gained, None for a row that has ended. Arguments as for `generate`.

    With a draft it is a `Speculation`, whose `acceptance` counts what became of the proposals so far.
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
        feed = _feed(model, rows, max_new_tokens, cache, prefill_chunk, engine, precision)
    return _stream(model, feed, max_new_tokens, sampling, uniform, stops)


def _stream(
    model: Model,
    feed: Feed,
    max_new_tokens: int,
    sampling: Sampling,
    uniform: Tensor,
    stops: list[list[int]],
) -> Iterator[list[int | None]]:
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
    model: Model, prompts: list[list[int]], steps: Iterator[list[int | None]], stops: list[list[int]]
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
    return Generated(whole, [len(row) for row in start], finished, acceptance=acceptance)


def _feed(
    model: Model,
    rows: list[list[int]],
    max_new_tokens: int,
    cache: bool | CacheKind,
    chunk: int | None,
    engine: Engine,
    precision: Precision,
    beams: int = 1,
) -> Feed:
    assert isinstance(model, DecoderLM | Seq2Seq)  # read_prompts refused the rest
    chunk, kind = _check_chunk(chunk), _cache_kind(cache)
    if model.device.type == "cuda" and isinstance(model, DecoderLM):
        from glassformer.generation.cuda_feed import CudaFeed, chosen

        if chosen(model, kind, engine, precision, len(rows), beams):
            return CudaFeed(model, rows, max_new_tokens, chunk, precision)
        return Feed(model, rows, max_new_tokens, kind, chunk)
    if choose_engine(model, kind, engine, precision) == "native":
        assert isinstance(model, DecoderLM)
        return NativeFeed(model, rows, max_new_tokens, chunk, precision)
    return Feed(model, rows, max_new_tokens, kind, chunk)


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
