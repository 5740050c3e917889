"""Beam search: follow the M likeliest continuations of each row at once.

The rules are those of `transformers`, so that results can be compared token for token:

* From the M beams of a row take the c M best candidates by total log-probability, c = max(2, 1 + number of stops):
  enough that M remain after those that end.
* A candidate that ends (stop sequence, or the last allowed step) among the M best is finished with score
  total / length ** length_penalty, length counting new tokens; the M best finished ones are kept.
* The M best candidates that do not end go on.
* A row is done once M are finished and the best running beam, scored at its present length, no longer beats the worst
  of them. (A longer continuation might, if length_penalty > 0: it is a heuristic.)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassformer.generation.feed import Feed, ends_with
from glassformer.generation.sampling import penalize
from glassformer.shapes import Float


@dataclass(frozen=True)
class Hypothesis:
    tokens: list[int]
    """New tokens only."""
    score: float
    stopped: bool


@dataclass
class RowBeams:
    """One prompt's search."""

    tokens: list[list[int]]
    scores: list[float]
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False


def beam_search(
    feed: Feed,
    max_new_tokens: int,
    beams: int,
    length_penalty: float,
    stops: list[list[int]],
    repetition_penalty: float,
) -> list[Hypothesis]:
    """The best hypothesis of every row."""
    n_rows = len(feed.rows)
    logits = feed.start()
    device = logits.device
    spread = torch.arange(n_rows, device=device).repeat_interleave(beams)
    feed.reorder(spread)
    logits = logits.index_select(0, spread)
    # all beams of a row start equal: only the first may be extended, or they would stay copies of one another
    rows = [RowBeams([[] for _ in range(beams)], [0.0] + [-1e9] * (beams - 1)) for _ in range(n_rows)]
    keep = max(2, 1 + len(stops)) * beams
    for length in range(1, max_new_tokens + 1):
        totals = _totals(logits, feed, rows, repetition_penalty)
        best, where = totals.topk(min(keep, totals.shape[1]))
        parents: list[int] = []
        vocabulary = logits.shape[-1]
        for i, row in enumerate(rows):
            candidates = [
                (score, index // vocabulary, index % vocabulary)
                for score, index in zip(best[i].tolist(), where[i].tolist(), strict=True)
            ]
            chosen = _advance(row, candidates, length, max_new_tokens, beams, length_penalty, stops)
            parents += [i * beams + beam for beam in chosen]
        if length == max_new_tokens or all(row.done for row in rows):
            break
        feed.reorder(torch.tensor(parents, device=device))
        logits = feed.step(torch.tensor([tokens[-1] for row in rows for tokens in row.tokens], device=device))
    return [row.finished[0] for row in rows]


def _totals(
    logits: Float[Tensor, "N V"], feed: Feed, rows: list[RowBeams], repetition_penalty: float
) -> Float[Tensor, "R C"]:
    """(rows, beams * V): log-probability of every beam extended by every token."""
    steps = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    if repetition_penalty != 1:
        seen = torch.zeros_like(steps, dtype=torch.bool)
        beams = len(rows[0].tokens)
        for i, row in enumerate(rows):
            for b, tokens in enumerate(row.tokens):
                seen[i * beams + b, feed.rows[i] + tokens] = True
        steps = penalize(steps, seen, repetition_penalty)
    so_far = torch.tensor([row.scores for row in rows], dtype=steps.dtype, device=steps.device)
    return (steps.unflatten(0, so_far.shape) + so_far[:, :, None]).flatten(1)


def _advance(
    row: RowBeams,
    candidates: list[tuple[float, int, int]],
    length: int,
    max_new_tokens: int,
    beams: int,
    length_penalty: float,
    stops: list[list[int]],
) -> list[int]:
    """Finish the candidates that end, let the best others go on; returns the parent beam of each that does."""
    running: list[tuple[float, int, list[int]]] = []
    for rank, (score, beam, token) in enumerate(candidates):
        tokens = [*row.tokens[beam], token]
        stopped = ends_with(tokens, stops)
        if not stopped and length < max_new_tokens:
            running.append((score, beam, tokens))
        elif rank < beams and not row.done:
            row.finished.append(Hypothesis(tokens, score / length**length_penalty, stopped))
    row.finished.sort(key=lambda h: -h.score)  # stable: the earlier of two equal ones stays ahead
    del row.finished[beams:]
    if length == max_new_tokens:
        return []
    if len(running) < beams:
        # only possible with a vocabulary smaller than the candidates asked for: repeat the last, hopeless
        filler = (-1e9, *(running[-1][1:] if running else (0, [*row.tokens[0], candidates[0][2]])))
        running += [filler] * (beams - len(running))
    running = running[:beams]
    row.tokens, row.scores = [r[2] for r in running], [r[0] for r in running]
    if len(row.finished) == beams and running[0][0] / length**length_penalty <= row.finished[-1].score:
        row.done = True
    return [r[1] for r in running]
