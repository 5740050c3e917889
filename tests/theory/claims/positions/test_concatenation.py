"""Concatenation against addition: the helpers, the numbers, and what happens without z3."""

import itertools
import sys

import numpy as np

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.positions import concatenation
from glassformer.theory.claims.registry import check


def test_rank_and_solvability_agree_with_numpy():
    for values in itertools.product((-1, 0, 1), repeat=4):
        Wx = (values[:2], values[2:])
        assert concatenation.rank(Wx) == np.linalg.matrix_rank(np.array(Wx))
        for column in itertools.product((-1, 0, 1), repeat=2):
            joined = np.column_stack([np.array(Wx), column])
            assert concatenation.absorbs(Wx, column) == (np.linalg.matrix_rank(joined) == concatenation.rank(Wx))


def test_the_two_weight_counts_are_in_the_evidence():
    found = {p.id: p.evidence for p in concatenation.concat_vs_add(Lab())}
    counts = found["weights D_out (D + P) against D_out D"]
    assert (counts["concatenated"], counts["added"]) == ("16 x (16 + 16) = 512", "16 x 16 = 256")
    assert found["possible iff col(W_e) lies in col(W_x)"]["cases"] == 6561


def test_without_z3_a_part_is_skipped_and_the_control_still_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "z3", None)
    whole = check("concat-vs-add")
    assert whole.passed
    assert "z3 is not installed" in whole.why
    assert check("concat-vs-add", broken=True).verdict == "fail"
