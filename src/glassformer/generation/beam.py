"""Beam search: follow the M most likely continuations of each prompt at once.

The rules are those of `transformers`, so that results can be compared token for token:

* From the M beams of a prompt take the c M best candidates by total log-probability, c = max(2, 1 + number of stops):
  enough that M remain after those that end.
* A candidate that ends (stop sequence, or the last allowed step) among the M best is finished with score
  total / length ** length_penalty, where length counts new tokens; the M best finished ones are kept.
* The M best candidates that do not end continue.
* The search of a prompt is done once M are finished and the best running beam, scored at its present length, no longer
  beats the worst of them. (A longer continuation might, if length_penalty > 0: this is a heuristic.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassformer.config import Special
from glassformer.generation.constraints import Constraints
from glassformer.generation.sampling import penalize
from glassformer.generation.state import DecodeState, ends_with, one_thread
from glassformer.shapes import Float


@dataclass(frozen=True)
class BeamSettings:
    """How to search. `beams` is M."""

    beams: int
    max_new_tokens: int
    stops: Sequence[list[int]] = ()
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    special: Special = Special()
    """The tokens that the model's config forces or suppresses."""


@dataclass(frozen=True)
class Hypothesis:
    tokens: list[int]
    """New tokens only."""
    score: float
    stopped: bool


@dataclass
class Search:
    """The search of one prompt."""

    tokens: list[list[int]]
    """New tokens of each running beam."""
    scores: list[float]
    """Total log-probability of each running beam."""
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False


def beam_search(state: DecodeState, settings: BeamSettings) -> list[Hypothesis]:
    """Return the best hypothesis of every prompt."""
    beams = settings.beams
    logits = state.start()
    spread = torch.arange(len(state.prompts), device=logits.device).repeat_interleave(beams)
    state.reorder(spread)
    logits = logits.index_select(0, spread)
    # all beams of a prompt start equal: only the first may be extended, or they would stay copies of one another
    searches = [Search([[] for _ in range(beams)], [0.0] + [-1e9] * (beams - 1)) for _ in state.prompts]
    keep = max(2, 1 + len(settings.stops)) * beams
    with one_thread(state.owns_threads):
        _search(state, settings, searches, logits, keep)
    return [search.finished[0] for search in searches]


def _search(
    state: DecodeState, settings: BeamSettings, searches: list[Search], logits: Float[Tensor, "N V"], keep: int
) -> None:
    """Extend all beams step by step, with `keep` candidates for each prompt, until every search is done."""
    beams, max_new_tokens, device = settings.beams, settings.max_new_tokens, logits.device
    for length in range(1, max_new_tokens + 1):
        totals = _totals(logits, state.prompts, searches, settings, length - 1)
        best, where = totals.topk(min(keep, totals.shape[1]))
        parents: list[int] = []
        vocabulary = logits.shape[-1]
        for i, search in enumerate(searches):
            candidates = [
                (score, index // vocabulary, index % vocabulary)
                for score, index in zip(best[i].tolist(), where[i].tolist(), strict=True)
            ]
            parents += [i * beams + beam for beam in _advance(search, candidates, length, settings)]
        if length == max_new_tokens or all(search.done for search in searches):
            break
        state.reorder(torch.tensor(parents, device=device))
        last = [tokens[-1] for search in searches for tokens in search.tokens]
        logits = state.step(torch.tensor(last, device=device))


def _totals(
    logits: Float[Tensor, "N V"], prompts: list[list[int]], searches: list[Search], settings: BeamSettings, step: int
) -> Float[Tensor, "P C"]:
    """Return (prompts, beams * V): the log-probability of every beam extended by every token."""
    steps = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    if settings.repetition_penalty != 1:
        seen = torch.zeros_like(steps, dtype=torch.bool)
        beams = len(searches[0].tokens)
        for i, search in enumerate(searches):
            for b, tokens in enumerate(search.tokens):
                seen[i * beams + b, prompts[i] + tokens] = True
        steps = penalize(steps, seen, settings.repetition_penalty)
    if settings.special.limits_generation:
        steps = Constraints(settings.special, settings.max_new_tokens).apply(steps, step)
    so_far = torch.tensor([search.scores for search in searches], dtype=steps.dtype, device=steps.device)
    return (steps.unflatten(0, so_far.shape) + so_far[:, :, None]).flatten(1)


def _advance(
    search: Search, candidates: list[tuple[float, int, int]], length: int, settings: BeamSettings
) -> list[int]:
    """Finish the candidates that end and let the best others continue; return the parent beam of each of those."""
    beams, is_last = settings.beams, length == settings.max_new_tokens
    running: list[tuple[float, int, list[int]]] = []
    for rank, (score, beam, token) in enumerate(candidates):
        tokens = [*search.tokens[beam], token]
        stopped = ends_with(tokens, settings.stops)
        if not stopped and not is_last:
            running.append((score, beam, tokens))
        elif rank < beams and not search.done:
            search.finished.append(Hypothesis(tokens, score / length**settings.length_penalty, stopped))
    search.finished.sort(key=lambda h: -h.score)  # stable: the earlier of two equal ones stays ahead
    del search.finished[beams:]
    if is_last:
        return []
    if len(running) < beams:
        # only possible if the vocabulary is smaller than the number of candidates: repeat the last with no chance
        filler = (-1e9, *(running[-1][1:] if running else (0, [*search.tokens[0], candidates[0][2]])))
        running += [filler] * (beams - len(running))
    running = running[:beams]
    search.tokens, search.scores = [r[2] for r in running], [r[0] for r in running]
    if len(search.finished) == beams and running[0][0] / length**settings.length_penalty <= search.finished[-1].score:
        search.done = True
    return [r[1] for r in running]
