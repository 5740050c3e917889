"""Splitting rules are recognised in every spelling, and no other is taken for one of them."""

import pytest

from glassformer.weights.tokenizer.splits import GPT2, LLAMA3, SPLITS, Split, by_name, byte_level, byte_signs, recognize


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.names[0])
def test_each_is_recognised_and_found_by_its_names(split):
    assert recognize(split.steps(), split.ignore_merges) is split
    assert all(by_name(name) is split for name in split.names)


def test_spellings_of_the_same_rule():
    gpt2 = by_name("gpt-2")
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert recognize(plain, False) is gpt2
    assert recognize({"type": "Sequence", "pretokenizers": [plain]}, False) is gpt2
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Removed", "invert": True}
    steps = {"type": "Sequence", "pretokenizers": [split, byte_level(False)]}
    assert recognize(steps, True) is by_name("llama-bpe")
    assert recognize(steps, False) is by_name("dbrx")


@pytest.mark.parametrize(
    "steps",
    [
        None,
        {"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
        Split((), LLAMA3 + "|x").steps(),
        {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False},
    ],
    ids=str,
)
def test_other_rules_are_not_known(steps):
    assert recognize(steps, False) is None
    assert by_name("default") is None


def test_signs_of_bytes():
    signs = byte_signs()
    assert len(set(signs)) == 256
    assert (signs[0x20], signs[0x0A], signs[0x41]) == ("Ġ", "Ċ", "A")
