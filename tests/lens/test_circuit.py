"""The hand-built induction circuit: exhaustive counts, exact terms, and the same thing as a model."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.lens.circuit import Circuit, as_model, census, continuations, empirical, run, score_terms
from glassformer.lens.heads import induction_score, previous_token_score
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace

MODEL = as_model(5, 12)
sequences = st.lists(st.integers(0, 4), min_size=1, max_size=11)


def test_with_bos_every_sequence_gives_the_empirical_continuations():
    assert census(bos=True) == (903, 903)


def test_without_bos_the_first_token_counts_as_its_own_predecessor():
    assert census(bos=False) == (555, 903)
    a, b, _ = continuations([0, 1, 0], n_tokens=2, bos=False)
    assert a == Fraction(1000001, 2000001)
    assert b == Fraction(1000000, 2000001)


def test_the_shortest_useful_prompts_and_the_ones_that_fail():
    assert continuations([0, 0], 2)[0] > Fraction(999, 1000)
    assert continuations([0, 1, 0], 2)[1] > Fraction(999, 1000)
    assert empirical([0], 2) is None
    assert empirical([0, 1, 2], 3) is None
    assert continuations([0], 2) == [Fraction(1, 2), 0, Fraction(1, 2)]  # nothing to find: uniform over BOS and itself
    assert continuations([0], 2, bos=False) == [1, 0, 0]  # softmax forces a repetition


@pytest.mark.parametrize(
    ("without", "works"), [(["k"], False), (["k", "q"], False), (["q"], True), (["direct", "q", "qk"], True)]
)
def test_only_the_k_composition_term_matters(without, works):
    # sequences over 3 tokens of length 1 to 5 whose last token occurred before: 363 - 3 (1 + 2 + 4 + 8 + 16) = 270
    assert census(longest=5, without=without) == (270 if works else 0, 270)


def test_in_the_mirrored_circuit_it_is_the_q_composition_that_matters():
    """Negative control: query and key weights swapped. The terms swap with them, and it looks for x_s = x_{t-1}."""

    class Mirrored(Circuit):
        q2, k2 = Circuit.k2, Circuit.q2

    straight, mirrored = (run(kind(3, 8), [0, 1, 2, 0, 1]) for kind in (Circuit, Mirrored))
    assert np.array_equal(mirrored.terms["q"], straight.terms["k"].T)
    assert mirrored.terms["q"].any()
    assert not mirrored.terms["k"].any()
    assert straight.output[-1][2] > Fraction(999, 1000)
    assert mirrored.output[-1][2] < Fraction(1, 1000)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_the_four_terms_sum_to_the_score(seed, size, width, head):
    rng = np.random.default_rng(seed)
    x, h = rng.integers(-9, 10, (2, size, width))
    w_q, w_k = rng.integers(-9, 10, (2, width, head))
    r = x + h
    assert np.array_equal(sum(score_terms(x, h, w_q, w_k).values()), r @ w_q @ (r @ w_k).T)


@given(sequences, st.booleans())
def test_every_distribution_is_exact(tokens, bos):
    found = run(Circuit(5, 12), tokens, bos)
    for row in (*found.pattern2, *found.output):
        assert sum(row) == 1
        assert min(row) >= 0
    assert (found.pattern1.sum(1) == 1).all()
    assert np.array_equal(found.scores, found.terms["k"])  # the other terms are zero: their slots are separate


def test_the_detectors_name_both_heads():
    block = [3, 0, 4, 1, 2]
    found = run(Circuit(5, 11), block * 2)
    ids = torch.tensor(found.tokens)
    pattern2 = torch.zeros(11, 11, dtype=torch.float64)
    for t, row in enumerate(found.pattern2):
        pattern2[t, : t + 1] = torch.tensor([float(a) for a in row])
    assert previous_token_score(torch.from_numpy(found.pattern1).double()).item() == 1
    assert induction_score(pattern2, ids).item() == pytest.approx(1, abs=1e-4)
    assert induction_score(torch.from_numpy(found.pattern1).double(), ids).item() == 0


@given(sequences, st.booleans())
def test_as_a_model_it_attends_and_ranks_as_the_exact_circuit(tokens, bos):
    exact = run(Circuit(5, 12), tokens, bos)
    found = trace(MODEL, [list(exact.tokens)], sites="blocks.*.attention.*")
    first, second = (found[f"blocks.{layer}.attention.pattern"][0, 0] for layer in (0, 1))
    # head 1 leaks 1e-6 to each of up to 11 keys, worth a factor e^(β · 1e-5) in head 2
    torch.testing.assert_close(first, torch.from_numpy(exact.pattern1).double(), atol=1.2e-5, rtol=0)
    for t, row in enumerate(exact.pattern2):
        expected = torch.tensor([float(a) for a in row], dtype=torch.float64)
        torch.testing.assert_close(second[t, : t + 1], expected, atol=2e-4, rtol=0)
    logits = found.logits[0, -1]
    copied = torch.tensor([float(v) for v in exact.output[-1]], dtype=torch.float64)
    torch.testing.assert_close(logits / logits.sum(), copied, atol=2e-4, rtol=0)


def test_the_model_is_two_layers_of_attention_and_continues_a_repetition():
    assert not [name for name in trace(MODEL, [[5, 0]]) if "feedforward" in name]
    block = [5, 2, 0, 1, 4, 2, 0]
    assert trace(MODEL, [block], sites=[]).logits[0, -2:].argmax(-1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: run(Circuit(3, 4), [0, 1, 2, 0]),
            "5 tokens with BOS do not fit the circuit's 4 positions: give 1 to 3",
        ),
        (lambda: run(Circuit(3, 4), []), "give 1 to 3"),
        (lambda: run(Circuit(3, 4), [3]), "token 3 is outside the circuit's vocabulary: use 0 to 2"),
        (lambda: continuations([0], 3, without=["kq"]), "no term 'kq' to delete: use direct, q, k or qk"),
        (lambda: Circuit(0, 4), "n_tokens=0 must be at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(LensError, match=message):
        call()
