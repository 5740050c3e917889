"""The document's numbers, as data."""

from fractions import Fraction

import numpy as np
import pytest

from glassformer.theory.claims.example import printed as doc


def test_all_eighteen_are_there_and_shown():
    assert len(doc.SLIPS) == 18
    assert [slip.where for slip in doc.SLIPS if not slip.shown()] == []


def test_a_slip_that_is_none_is_not_shown():
    assert doc.Slip("", {"S[1,2]": "5/2"}, {"S[1,2]": "-5/2"}).shown()
    assert not doc.Slip("", {"S[1,2]": "-5/2"}, {"S[1,2]": "-5/2"}).shown()
    assert not doc.Slip("", {"S[1,2]": "5/2"}, {"S[1,2]": "-7/2"}).shown()
    assert not doc.Slip("", {"S[1,2]": "5/2", "Q11": "0"}, {"S[1,2]": "-5/2"}).shown()


@pytest.mark.parametrize("line", doc.LINES, ids=lambda line: line.name)
def test_lines_add_up_to_what_is_recorded(line):
    assert str(line.evaluate()) == line.literal


def test_lines_without_slips_give_the_right_entries():
    for name in ("Q11", "K21", "V32"):
        assert doc.Line(name, "", "").evaluate() == doc.Line(name, "", "").correct()


def test_matrices_agree_with_numpy():
    q, k, s, inputs, w_q, printed_s = (
        np.array(m, dtype=float) for m in (doc.Q, doc.K, doc.S, doc.INPUT, doc.W_Q, doc.PRINTED_S)
    )
    np.testing.assert_allclose(q, inputs @ w_q)
    np.testing.assert_allclose(s, q @ k.T)
    assert doc.PRINTED_S.det() == Fraction(185, 8)
    assert np.linalg.det(printed_s) == pytest.approx(185 / 8)


def test_attention_is_a_softmax_of_rows():
    rows, out = doc.attention(doc.PLAIN)
    S, V = (np.array(m, dtype=float) for m in (doc.S, doc.V))
    A = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.array(rows, dtype=float), A, rtol=1e-14)
    np.testing.assert_allclose(np.array(out, dtype=float), A @ V, rtol=1e-13)
