"""Greedy and beam search against transformers' generate, and against a search of every sequence."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from glassformer import config as gf
from glassformer.reference import (
    beam,
    beam_search,
    beam_seq2seq,
    forward,
    forward_seq2seq,
    greedy,
    greedy_seq2seq,
    random_params,
    sequence_log_probability,
)

from . import peers

PENALTIES = [0.0, 1.0, 2.0, -1.0]


def generated(model: Any, ids: list[int], eos: tuple[int, ...], **options: Any) -> Any:
    """generate() on one prompt. pad is given, for else transformers borrows eos and says so."""
    return model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        early_stopping=False,
        **options,
    )


@pytest.mark.parametrize("seed", range(3))
def test_greedy_equals_transformers(seed: int) -> None:
    peer = peers.gpt2(seed)
    del peer.model.generation_config.eos_token_id
    prompt = [3, 1, 4]
    theirs = generated(peer.model, prompt, (), max_new_tokens=8, num_beams=1)[0].tolist()
    assert greedy(peer.config, peer.params, prompt, 8) == theirs
    stop = theirs[5]
    first = theirs.index(stop, len(prompt))
    assert greedy(peer.config, peer.params, prompt, 8, stop=[stop]) == theirs[: first + 1]


def beams_of(output: Any, M: int, start: int, eos: tuple[int, ...]) -> list[tuple[list[int], float]]:
    """The M sequences of generate's output, cut after their end: shorter ones are filled up to the longest."""
    rows = []
    for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        ends = [i for i in range(start, len(row)) if row[i] in eos]
        rows.append((row[: ends[0] + 1] if ends else row, score))
    assert len(rows) == M
    return rows


def likely(written: list[int], count: int) -> tuple[int, ...]:
    """`count` different ids off the end of what greedy search wrote: ends that a search will meet."""
    return tuple(dict.fromkeys(reversed(written)))[:count]


@pytest.mark.sample(4)
@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("n_eos", [0, 1, 3])
def test_beam_equals_transformers_gpt2(length_penalty: float, n_eos: int) -> None:
    prompt, n = [3, 1, 4], 8
    early = 0
    for seed, M in itertools.product(range(4), (2, 4)):
        peer = peers.gpt2(seed, std=0.3 if seed % 2 else 0.2)
        eos = likely(greedy(peer.config, peer.params, prompt, n)[3:], n_eos)
        options = {"num_beams": M, "max_new_tokens": n, "length_penalty": length_penalty, "num_return_sequences": M}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        if not eos:
            del peer.model.generation_config.eos_token_id
        theirs = beams_of(generated(peer.model, prompt, eos, **options), M, len(prompt), eos)
        ours = beam_search(lambda s, p=peer: forward(p.config, p.params, s)[:, -1], prompt, n, M, length_penalty, eos)
        assert [list(h.tokens) for h in ours] == [tokens for tokens, _ in theirs]
        # transformers sums log probabilities in float32: 8 terms of size 3, 1e-7 each
        np.testing.assert_allclose([h.score for h in ours], [score for _, score in theirs], rtol=1e-5)
        assert beam(peer.config, peer.params, prompt, n, M, length_penalty, eos) == theirs[0][0]
        early += len(theirs[0][0]) < len(prompt) + n
    assert (early > 0) == (n_eos > 0)  # the cases do exercise an early end


@pytest.mark.sample(2)
@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_beam_equals_transformers_t5(length_penalty: float) -> None:
    source, n = [3, 1, 4, 1, 5, 9], 7
    early = 0
    for seed, M in itertools.product(range(3), (2, 3)):
        peer = peers.t5(seed=seed)
        eos = likely(greedy_seq2seq(peer.config, peer.params, source, n)[1:], 2)
        # without a cache: transformers sizes it by the encoder's depth and fails when the decoder is deeper
        options = {"num_beams": M, "max_new_tokens": n, "length_penalty": length_penalty, "use_cache": False}
        theirs = generated(peer.model, source, eos, **options)[0].tolist()
        assert beam_seq2seq(peer.config, peer.params, source, n, M, length_penalty, eos) == theirs
        early += len(theirs) < 1 + n
    assert early > 0


def test_greedy_t5_equals_transformers() -> None:
    peer, source = peers.t5(gated=True), [3, 1, 4, 1, 5]
    theirs = generated(peer.model, source, (7,), max_new_tokens=6, num_beams=1, use_cache=False)[0].tolist()
    assert greedy_seq2seq(peer.config, peer.params, source, 6, stop=(7,)) == theirs
    assert theirs[0] == 0


def small(vocab_size: int = 4) -> tuple[gf.DecoderConfig, dict[str, np.ndarray]]:
    config = gf.DecoderConfig(
        vocab_size=vocab_size,
        d_model=6,
        n_layers=1,
        attention=gf.Attention(2),
        feedforward=gf.Dense(5),
        position=gf.Alibi(),
        norm=gf.LayerNorm(),
    )
    return config, random_params(config, std=1.0)


def test_wide_beam_without_eos_finds_the_most_probable_of_all_sequences() -> None:
    config, params = small()
    prompt, n = [1, 2], 3
    every = [[*prompt, *tail] for tail in itertools.product(range(4), repeat=n)]
    best = max(every, key=lambda tokens: sequence_log_probability(config, params, tokens, len(prompt)))
    assert beam(config, params, prompt, n, beams=4**n, length_penalty=0.0) == best


def test_score_is_log_probability_over_length_to_the_penalty() -> None:
    config, params = small()
    found = beam_search(lambda s: forward(config, params, s)[:, -1], [1, 2], 4, 2, 1.5, eos=(0,))
    for hypothesis in found:
        length = len(hypothesis.tokens) - 2
        log_probability = sequence_log_probability(config, params, hypothesis.tokens, 2)
        assert hypothesis.score == pytest.approx(log_probability / length**1.5, rel=1e-12)


def test_one_beam_without_eos_is_greedy() -> None:
    config, params = small()
    assert beam(config, params, [1, 2], 5, beams=1) == greedy(config, params, [1, 2], 5)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    config, params = small()
    flat = {name: np.zeros_like(value) for name, value in params.items()}
    assert greedy(config, flat, [3], 3) == [3, 0, 0, 0]


def test_an_end_ranked_below_the_beams_is_lost() -> None:
    """By hand, V = 4, one beam, eos 3: at step 1 eos ranks second of the two candidates, so nothing finishes."""
    table = {0: [0.1, 0.5, 0.0, 0.4], 1: [0.6, 0.1, 0.1, 0.2]}

    def next_logits(sequences: list[list[int]]) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log([table[tokens[-1]] for tokens in sequences])

    found = beam_search(next_logits, [0], 2, 1, 1.0, eos=(3,))
    assert [h.tokens for h in found] == [(0, 1, 0)]
    assert found[0].score == pytest.approx(np.log(0.5 * 0.6) / 2, rel=1e-14)


def test_search_stops_when_the_worst_finished_beats_the_best_live() -> None:
    calls = []

    def next_logits(sequences: list[list[int]]) -> np.ndarray:
        calls.append(len(sequences))
        return np.log([[0.05, 0.05, 0.9] for _ in sequences])

    found = beam_search(next_logits, [0], 9, 1, 1.0, eos=(2,))
    assert found[0].tokens == (0, 2)
    assert calls == [1]


def test_log_probability_is_the_sum_over_predicted_tokens() -> None:
    config, params = small()
    every = [[1, a, b] for a in range(4) for b in range(4)]
    total = sum(np.exp(sequence_log_probability(config, params, tokens)) for tokens in every)
    assert total == pytest.approx(1, rel=1e-13)


def test_errors_name_what_is_wrong() -> None:
    config, params = small()
    with pytest.raises(ValueError, match="at least 1"):
        beam(config, params, [1], 0, beams=2)
    with pytest.raises(ValueError, match="no token precedes it"):
        sequence_log_probability(config, params, [1, 2], 0)
    peer = peers.t5()
    without = gf.replace(peer.config, special=gf.Special())
    with pytest.raises(ValueError, match=r"special\.start is None"):
        greedy_seq2seq(without, peer.params, [1], 2)
    assert forward_seq2seq(peer.config, peer.params, [[1]], [[0]]).shape == (1, 1, 23)
