"""Grokking."""

import pytest

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.theory import grokking


@pytest.mark.parametrize(("p", "wrong"), [(7, 0), (11, 0), (9, 4), (15, 16)])
def test_zero_divisors_exist_for_composite_moduli_only(p, wrong):
    assert grokking._residues_wrong((p,)) == (wrong, (p - 1) ** 2)


def test_a_frequency_that_divides_the_modulus_misses_answers():
    assert grokking._subsets_wrong(5) == (15, 0)
    subsets, failed = grokking._subsets_wrong(9)
    assert (subsets, failed) == (255, 3)  # {3}, {6} and {3, 6}


@pytest.mark.parametrize("seed", [1, 2])
def test_rescaled_network_is_the_same_function_with_another_norm(seed):
    same, norms = grokking._rescaled(Lab(seed))
    assert same
    assert norms[0] != norms[1]


def test_training_is_left_out_aloud_when_there_is_no_time():
    [left_out] = [p for p in grokking.grokking_weight_norm(Lab()) if p.verdict == "skip"]
    assert "--slow" in left_out.why


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_runs_stay_in_their_bands_and_fail_without_decay(seed):
    assert [p.text() for p in grokking._training_parts(Lab(seed)) if not p.passed] == []
    failed = [p.id for p in grokking._training_parts(Lab(seed, broken=True)) if not p.passed]
    assert failed == ["understood by step 3000", "the norm falls again"]
