"""The ways in which ranks share the work: names, settings, and which are possible."""

import pytest

from glassformer.config import presets
from glassformer.sizing.devices import H200
from glassformer.sizing.strategy import Strategy, parse_strategy, strategies

LLAMA = presets.llama3_8b()


@pytest.mark.parametrize(
    ("text", "settings", "shards"),
    [
        ("data", {"parallel": "ddp"}, 1),
        ("sharded", {"parallel": "fsdp"}, 64),
        ("replicate 4", {"parallel": "fsdp", "replicate": 4}, 16),
        ("tensor 8", {"parallel": "fsdp", "tensor": 8}, 8),
        ("context 8", {"parallel": "fsdp", "context": 8}, 64),
        ("replicate 2 x tensor 4 x context 8", {"parallel": "fsdp", "replicate": 2, "tensor": 4, "context": 8}, 8),
    ],
)
def test_a_name_is_read_and_written(text, settings, shards):
    found = parse_strategy(text)
    assert str(found) == text
    assert found.settings == settings
    assert found.shards(64) == shards


@pytest.mark.parametrize(
    "text", ["pipeline", "tensor", "tensor 1", "tensor x", "tensor 2 x tensor 2", "", "data x tensor 2"]
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match="is not known"):
        parse_strategy(text)


def test_one_device_shares_nothing_and_machines_get_a_copy_each():
    assert strategies(1, H200, LLAMA, 8192) == [Strategy(is_sharded=False)]
    assert not any(one.replicate > 1 for one in strategies(8, H200, LLAMA, 8192))
    assert {one.replicate for one in strategies(64, H200, LLAMA, 8192)} == {1, 8}
    assert {one.tensor for one in strategies(64, H200, LLAMA, 8192)} == {1, 2, 4, 8}  # 8 devices in a machine
    assert {one.context for one in strategies(64, H200, LLAMA, 16)} == {1, 2, 4, 8}  # two chunks for each rank
