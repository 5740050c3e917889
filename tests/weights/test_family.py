"""config.json is read value by value, typed, and special ids are taken where they make sense."""

import pytest

from glassformer.config import Special
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import ACTIVATIONS, Source, read_activation, write_activation, write_special


def source(generation=None, **data):
    return Source(data, None, generation or {})


def test_values_are_typed_and_null_means_absent():
    assert source(a=3).integer("a") == 3
    assert source(a=None).integer("a", 5) == 5
    assert source(a=3).number("a") == 3.0
    for wrong in ("3", True, 3.5, [3]):
        with pytest.raises(WeightsError, match="a="):
            source(a=wrong).integer("a")
    with pytest.raises(WeightsError, match="lacks 'a'"):
        source().integer("a")


def test_a_value_that_changes_the_arithmetic_is_refused():
    source(a=False).only("a", False, why="which is new")
    source().only("a", False, why="which is new")
    with pytest.raises(WeightsError, match="a=True, which is new: only a=False is supported"):
        source(a=True).only("a", False, why="which is new")


def test_every_activation_has_one_spelling_out_and_all_of_them_in():
    for ours, theirs in ACTIVATIONS.items():
        assert all(read_activation(name, "act") == ours for name in theirs)
        assert write_activation(ours) == theirs[0]
    with pytest.raises(WeightsError, match="mish"):
        read_activation("mish", "act")


def test_generation_config_overrules_and_ids_outside_the_vocabulary_are_left_out():
    given = source({"eos_token_id": [3, 4]}, eos_token_id=2, pad_token_id=-1, bos_token_id=1)
    assert given.special(10) == Special(bos=1, eos=(3, 4))
    assert "pad_token_id=-1" in given.notes[0]


def test_special_ids_written_are_read_again():
    for special in (Special(), Special(bos=1, eos=(2,), pad=3, start=4), Special(eos=(5, 6))):
        assert source(**write_special(special)).special(10) == special


def test_differing_dropouts_are_reported():
    given = source(a=0.1, b=0.2)
    assert given.dropout("a", "b") == 0.1
    assert "a=0.1, b=0.2" in given.notes[0]
    assert source(a=0.1, b=0.1).dropout("a", "b") == 0.1


def test_without_tensors_the_head_is_the_one_config_json_describes():
    assert source().head("m.", "head", "embed", tie=True) is True
    assert source().head("m.", "head", "embed", tie=False) is False
    assert source().head("", "head", "embed", tie=False) is None
