"""Decoding with the oracle: greedy decoding and beam search, without a KV cache.

Every step runs the complete model on the complete sequence and uses the logits of the last position. This is slow, but
there is no cache that could be wrong. All functions take and return plain lists of token ids for one prompt. The result
starts with the prompt (in an encoder-decoder with config.special.start, the first input of the decoder) and ends with
the stop token, if one was generated.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassformer.config import ModelConfig, Seq2SeqConfig, Special
from glassformer.reference.arrays import Array
from glassformer.reference.forward import forward, forward_seq2seq
from glassformer.reference.ops import log_softmax

NextLogits = Callable[[list[list[int]]], Array]
"""M sequences of equal length T -> the logits (M,V) of the next token of each."""


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence of a beam search."""

    tokens: tuple[int, ...]
    """The complete sequence, including the prompt."""
    score: float
    """Log probability of the n tokens after the prompt, divided by n ** length_penalty."""


def greedy(
    config: ModelConfig, params: Mapping[str, Any], prompt: Sequence[int], n: int, stop: Collection[int] = ()
) -> list[int]:
    """Append the most likely token up to n times, or until it is one of `stop`; ties go to the lowest id."""
    return _greedy(_decoder(config, params), prompt, n, stop, config.special)


def greedy_seq2seq(
    config: Seq2SeqConfig, params: Mapping[str, Any], source: Sequence[int], n: int, stop: Collection[int] = ()
) -> list[int]:
    """Decode greedily with an encoder-decoder whose encoder reads `source`."""
    return _greedy(_encoder_decoder(config, params, source), [_start(config)], n, stop, config.special)


def beam(
    config: ModelConfig,
    params: Mapping[str, Any],
    prompt: Sequence[int],
    n: int,
    beams: int,
    length_penalty: float = 1.0,
    eos: Collection[int] = (),
) -> list[int]:
    """Return the best sequence that `beam_search` finds."""
    next_logits = _decoder(config, params)
    return list(beam_search(next_logits, prompt, n, beams, length_penalty, eos, config.special)[0].tokens)


def beam_seq2seq(
    config: Seq2SeqConfig,
    params: Mapping[str, Any],
    source: Sequence[int],
    n: int,
    beams: int,
    length_penalty: float = 1.0,
    eos: Collection[int] = (),
) -> list[int]:
    """Return the best sequence of a beam search with an encoder-decoder whose encoder reads `source`."""
    next_logits = _encoder_decoder(config, params, source)
    start = [_start(config)]
    return list(beam_search(next_logits, start, n, beams, length_penalty, eos, config.special)[0].tokens)


def beam_search(
    next_logits: NextLogits,
    prompt: Sequence[int],
    n: int,
    beams: int,
    length_penalty: float = 1.0,
    eos: Collection[int] = (),
    special: Special = Special(),
) -> list[Hypothesis]:
    """Return up to `beams` hypotheses, best first, as transformers 5.22 does with early_stopping=False.

    The search keeps two lists: live sequences, which are extended, and finished sequences, whose score is final. At
    step t = 1..n every live sequence (at first only the prompt) is extended by every token of the vocabulary:

    1. Candidates. Keep the C extensions with the highest total log probability, C = max(2, 1 + number of eos ids) *
       beams. With that many, `beams` of them can stay live even if every live sequence ends. Ties go to the earlier
       live sequence, then to the lower id.
    2. End. A candidate ends if its last token is in `eos`. At t = n every candidate ends.
    3. Finished. A candidate that ends is added to the finished list if it is among the first `beams` candidates;
       otherwise it is discarded. Its score is total / t^length_penalty, where t counts the generated tokens, including
       eos. The list keeps the `beams` best scores; in a tie the older entry stays first.
    4. Live. The best `beams` candidates that did not end stay live.
    5. Stop if no sequence is live (always at t = n). Also stop if the finished list is full and the best live sequence,
       scored as if it ended now, is not better than the worst finished one: total / t^length_penalty <= worst score.
       With length_penalty > 0 this is a heuristic, because a longer sequence is divided by more and could still win.

    `special` forces or suppresses tokens (see `_allowed`): a forced token adds 0 to the total log probability, and the
    log probabilities of the others are not normalized again.

    If no eos is generated, the result is the best sequence of full length n, because step n finishes all candidates.

    Difference from transformers: it fills the initial live list with copies of the prompt at a score of -1e9. They
    matter only if V < C: then it may keep such copies live, while this search keeps fewer sequences.
    """
    if n < 1 or beams < 1:
        raise ValueError(f"n={n} and beams={beams} must both be at least 1.")
    eos_ids = set(eos)
    n_candidates = max(2, 1 + len(eos_ids)) * beams
    live: list[tuple[float, list[int]]] = [(0.0, list(prompt))]
    finished: list[Hypothesis] = []
    for t in range(1, n + 1):
        candidates = _continuations(next_logits, live, special, t - 1, n)[:n_candidates]
        live = []
        for rank, (total, tokens) in enumerate(candidates):
            if tokens[-1] not in eos_ids and t < n:
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


def _continuations(
    next_logits: NextLogits, live: list[tuple[float, list[int]]], special: Special, step: int, n: int
) -> list[tuple[float, list[int]]]:
    """Return every live sequence extended by every token allowed, highest total log probability first."""
    log_probabilities = log_softmax(next_logits([tokens for _, tokens in live]))
    allowed, forced = _allowed(special, step, n, log_probabilities.shape[1])
    candidates = [
        (total + (0.0 if forced else float(log_probabilities[i, token])), [*tokens, token])
        for i, (total, tokens) in enumerate(live)
        for token in allowed
    ]
    return sorted(candidates, key=lambda candidate: -candidate[0])  # stable: ties keep their order


def _allowed(special: Special, step: int, n: int, V: int) -> tuple[list[int], bool]:
    """Return the ids that may follow `step` new tokens out of n, and True if there is only one because it is forced.

    The last token is `forced_eos`, the first one `forced_bos`, if the config has them; the tokens of `suppressed` are
    never generated.
    """
    if step == n - 1 and special.forced_eos is not None:
        return [special.forced_eos], True
    if step == 0 and special.forced_bos is not None:
        return [special.forced_bos], True
    return [token for token in range(V) if token not in special.suppressed], False


def sequence_log_probability(
    config: ModelConfig, params: Mapping[str, Any], tokens: Sequence[int], prompt_length: int = 1
) -> float:
    """Return log p(continuation | prompt) = sum over t >= prompt_length of log p(tokens[t] | tokens[:t])."""
    if prompt_length < 1:
        raise ValueError(
            f"prompt_length={prompt_length} must be at least 1: the model cannot predict the first token, because no "
            "token precedes it."
        )
    log_probabilities = log_softmax(forward(config, params, [list(tokens)]))[0]
    return float(sum(log_probabilities[t - 1, tokens[t]] for t in range(prompt_length, len(tokens))))


def _greedy(
    next_logits: NextLogits, prompt: Sequence[int], n: int, stop: Collection[int], special: Special
) -> list[int]:
    tokens = list(prompt)
    for step in range(n):
        logits = next_logits([tokens])[0]
        allowed, _ = _allowed(special, step, n, len(logits))
        tokens.append(allowed[int(np.argmax(logits[allowed]))])
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
        raise ValueError("special.start is None: set it to the id of the token with which the decoder starts.")
    return config.special.start
