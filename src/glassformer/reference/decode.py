"""Writing text with the oracle: greedy and beam search, without a cache.

Every step runs the whole model on everything written so far and reads the last place: slow, and plainly right. All
functions take and return plain lists of ids for one prompt; what they return begins with the prompt (for an
encoder-decoder with config.special.start, which the decoder is given to begin with) and ends with the stop token, if
one was written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.config import ModelConfig, Seq2SeqConfig
from glassformer.reference.arrays import Array
from glassformer.reference.forward import forward, forward_seq2seq
from glassformer.reference.ops import log_softmax

NextLogits = Callable[[list[list[int]]], Array]
"""Sequences of equal length (M,T) -> logits (M,V) of what follows each."""


@dataclass(frozen=True)
class Hypothesis:
    tokens: tuple[int, ...]
    """The whole sequence, prompt included."""
    score: float
    """log probability of what was written after the prompt, divided by (its length ** length_penalty)."""


def greedy(
    config: ModelConfig, params: Mapping[str, Any], prompt: Sequence[int], n: int, stop: Collection[int] = ()
) -> list[int]:
    """The most probable token, n times or until one of `stop` is written; of equal logits the lowest id."""
    return _greedy(_decoder(config, params), prompt, n, stop)


def greedy_seq2seq(
    config: Seq2SeqConfig, params: Mapping[str, Any], source: Sequence[int], n: int, stop: Collection[int] = ()
) -> list[int]:
    """The same for an encoder-decoder that reads `source`."""
    return _greedy(_encoder_decoder(config, params, source), [_start(config)], n, stop)


def beam(
    config: ModelConfig,
    params: Mapping[str, Any],
    prompt: Sequence[int],
    n: int,
    beams: int,
    length_penalty: float = 1.0,
    eos: Collection[int] = (),
) -> list[int]:
    """The best sequence that `beam_search` finds."""
    return list(beam_search(_decoder(config, params), prompt, n, beams, length_penalty, eos)[0].tokens)


def beam_seq2seq(
    config: Seq2SeqConfig,
    params: Mapping[str, Any],
    source: Sequence[int],
    n: int,
    beams: int,
    length_penalty: float = 1.0,
    eos: Collection[int] = (),
) -> list[int]:
    """The same for an encoder-decoder that reads `source`."""
    found = beam_search(_encoder_decoder(config, params, source), [_start(config)], n, beams, length_penalty, eos)
    return list(found[0].tokens)


def beam_search(
    next_logits: NextLogits,
    prompt: Sequence[int],
    n: int,
    beams: int,
    length_penalty: float = 1.0,
    eos: Collection[int] = (),
) -> list[Hypothesis]:
    """Up to `beams` hypotheses, best first, as transformers 5.22 finds them with early_stopping=False.

    Two lists are kept: live sequences, which go on, and finished ones, which are scored and never change. At step
    t = 1..n every live sequence (first the prompt alone) is continued by every token of the vocabulary:
    1. Candidates. The best C by total log probability stay, C = max(2, 1 + number of eos ids) * beams: enough that
       `beams` of them can go on even if every live sequence ends. Equal ones: the earlier live sequence, the lower id.
    2. Ending. A candidate ends when its last token is in `eos`, and every candidate ends at t = n.
    3. Finished. A candidate that ends joins the finished list only if it is among the first `beams` of the C; a worse
       one is lost. Its score is its total / t^length_penalty; t counts what was written, eos included, prompt not. The
       list keeps the best `beams` scores; an old entry stays ahead of a new one that equals it.
    4. Live. The best `beams` candidates that did not end go on.
    5. Stop when nothing is live (always at t = n), or when the finished list is full and the best live sequence, scored
       as if it ended now, is no better than the worst finished: best total / t^length_penalty <= worst score. With
       length_penalty > 0 this is a heuristic: a longer sequence divides by more and might still have won.
    If no eos was ever written, the answer is the best sequence of full length n: step n finishes everything.

    transformers pads the live list at the start with copies of the prompt at -1e9; they matter only when V < C, where
    it may carry such copies on and this search just carries fewer sequences.
    """
    if n < 1 or beams < 1:
        raise ValueError(f"n={n} and beams={beams} must be at least 1.")
    ends = set(eos)
    width = max(2, 1 + len(ends)) * beams
    live: list[tuple[float, list[int]]] = [(0.0, list(prompt))]
    finished: list[Hypothesis] = []
    for t in range(1, n + 1):
        candidates = _continuations(next_logits, live)[:width]
        live = []
        for rank, (total, tokens) in enumerate(candidates):
            if tokens[-1] not in ends and t < n:
                live.append((total, tokens))
            elif rank < beams:
                finished.append(Hypothesis(tuple(tokens), total / t**length_penalty))
        live = live[:beams]
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:beams]
        if not live:
            break
        if len(finished) == beams and live[0][0] / t**length_penalty <= finished[-1].score:
            break
    return finished


def _continuations(next_logits: NextLogits, live: list[tuple[float, list[int]]]) -> list[tuple[float, list[int]]]:
    """Every live sequence with every next token, best total log probability first."""
    log_probabilities = log_softmax(next_logits([tokens for _, tokens in live]))
    candidates = [
        (total + float(log_probabilities[i, token]), [*tokens, token])
        for i, (total, tokens) in enumerate(live)
        for token in range(log_probabilities.shape[1])
    ]
    return sorted(candidates, key=lambda candidate: -candidate[0])  # a stable sort: equal ones keep their order


def sequence_log_probability(
    config: ModelConfig, params: Mapping[str, Any], tokens: Sequence[int], prompt_length: int = 1
) -> float:
    """log p(what follows the prompt | prompt) = sum over t >= prompt_length of log p(tokens[t] | tokens[:t])."""
    if prompt_length < 1:
        raise ValueError(
            "prompt_length must be at least 1: the first token has nothing before it to be predicted from."
        )
    log_probabilities = log_softmax(forward(config, params, [list(tokens)]))[0]
    return float(sum(log_probabilities[t - 1, tokens[t]] for t in range(prompt_length, len(tokens))))


def _greedy(next_logits: NextLogits, prompt: Sequence[int], n: int, stop: Collection[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(next_logits([tokens])[0])))
        if tokens[-1] in stop:
            break
    return tokens


def _decoder(config: ModelConfig, params: Mapping[str, Any]) -> NextLogits:
    return lambda sequences: forward(config, params, sequences)[:, -1]


def _encoder_decoder(config: Seq2SeqConfig, params: Mapping[str, Any], source: Sequence[int]) -> NextLogits:
    def next_logits(sequences: list[list[int]]) -> Array:
        return forward_seq2seq(config, params, [list(source)] * len(sequences), sequences)[:, -1]

    return next_logits


def _start(config: Seq2SeqConfig) -> int:
    if config.special.start is None:
        raise ValueError("special.start is None: an encoder-decoder needs the id that its decoder begins with.")
    return config.special.start
