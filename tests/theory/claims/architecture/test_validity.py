"""When a cache is right: the rule in cases that can be done by hand."""

import numpy as np
import pytest

from glassformer.theory.claims.architecture import validity
from glassformer.theory.claims.claim import Lab


def mask(*rows):
    return np.array([[[letter == "x" for letter in row] for row in rows]])


@pytest.mark.parametrize(
    ("rows", "one", "two", "three"),
    [
        (("x..", "xx.", "xxx"), True, True, True),  # causal
        (("xx.", "xx.", "xxx"), True, False, False),  # token 0 gains token 1, and both later ones read token 0
        (("x..", "xxx", "x.x"), True, True, True),  # token 1 gains token 2, and no query reads token 1
        (("x.x", "xx.", ".xx"), True, True, False),  # token 2 reads 1, which read 0, which gains 2: a chain of two
        (("xxx", "xxx", "xxx"), True, False, False),
    ],
)
def test_the_rule_by_hand(rows, one, two, three):
    assert [bool(validity.valid_by_rule(mask(*rows), layers)[0]) for layers in (1, 2, 3)] == [one, two, three]


def test_all_masks_are_there_once_with_a_full_diagonal():
    made = validity.all_masks(3)
    assert len({m.tobytes() for m in made}) == len(made) == 64
    assert made[:, range(3), range(3)].all()
    assert validity.is_causal(made).sum() == 8


def test_the_counts_do_not_depend_on_the_weights():
    for seed in (1, 2):
        found = validity.outcome.__wrapped__(3, 2, seed)
        assert (found.valid == found.rule).all()
        assert found.valid.sum() == 24


def test_the_sources_rule_is_wrong_for_sixteen_masks_of_three_tokens():
    found = {f.id: f for f in validity.kv_cache_validity(Lab(broken=True))}
    assert found["rule, n=3, L=2"].measured == 16
    assert not found["prefix-LM"].passed
