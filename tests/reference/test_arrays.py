import numpy as np

from glassformer.reference.arrays import add_prefix, select_prefix


def test_under_takes_whole_names_only() -> None:
    table = {"blocks.1.q": np.ones(1), "blocks.10.q": np.ones(2), "blocks.1.attention.q": np.ones(3)}
    assert {name: len(value) for name, value in select_prefix(table, "blocks.1").items()} == {"q": 1, "attention.q": 3}


def test_over_is_the_inverse_of_under() -> None:
    table = {"q.weight": np.ones(1), "norm.bias": np.ones(2)}
    assert select_prefix(add_prefix(table, "blocks.0"), "blocks.0") == table
