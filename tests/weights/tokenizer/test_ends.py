"""What families put in front of a text and behind it."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from glassformer.weights.tokenizer.ends import add_ends, ends, token_text

HABITS = {
    "gemma": ("<s>", None),
    "llama": ("<s>", None),
    "mistral": ("<s>", None),
    "cohere": ("<s>", None),
    "deepseek_v3": ("<s>", None),
    "gpt_neox": (None, None),
    "phi": (None, None),
    "falcon": (None, None),
    "bloom": (None, None),
    "qwen2": (None, None),
    "qwen3": (None, None),
    "olmo2": (None, None),
    "stablelm": (None, None),
    "granite": (None, None),
    "opt": ("</s>", None),
    "t5": (None, "</s>"),
    "mt5": (None, "</s>"),
    "marian": (None, "</s>"),
    "pegasus": (None, "</s>"),
    "bart": ("<s>", "</s>"),
    None: (None, None),
}


@pytest.mark.parametrize("kind", HABITS)
def test_habits_of_families(kind):
    assert ends(kind, {}) == HABITS[kind]


def test_the_config_of_the_tokenizer_decides_first():
    assert ends("llama", {"add_bos_token": False, "add_eos_token": True}) == (None, "</s>")
    config = {"add_bos_token": True, "bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "add_eos_token": True}
    assert ends("qwen2", config) == ("<bos>", "<eos>")
    assert token_text({"content": 3}) is None


def test_ends_are_added_to_texts_and_pairs():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    add_ends(tokenizer, None, "missing")
    assert tokenizer.encode("a b").ids == [2, 3]
    add_ends(tokenizer, "<s>", "</s>")
    assert tokenizer.encode("a b").ids == [0, 2, 3, 1]
    assert tokenizer.encode("a", "b").ids == [0, 2, 1, 0, 3, 1]
    add_ends(tokenizer, "</s>", None)
    assert tokenizer.encode("a").ids == [1, 2]
