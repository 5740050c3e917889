"""The section [lora] refuses what cannot be trained, in one sentence each."""

import pytest

from glassformer.errors import ConfigError
from glassformer.training.tuning.section import Lora


def test_the_defaults_are_allowed():
    assert Lora() == Lora(rank=16, targets="linear")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": -1.0}, "lora.alpha=-1.0"),
        ({"dropout": 1.0}, "lora.dropout=1.0"),
        ({"quantize": "int2"}, "quantize"),
        ({"targets": ()}, "lora.targets is empty"),
        ({"targets": "q"}, "lora.targets='q'"),
        ({"dora": True, "dropout": 0.1}, "lora.dropout=0"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, word):
    with pytest.raises(ConfigError, match=word) as refused:
        Lora(**changes)
    assert "\n" not in str(refused.value)
