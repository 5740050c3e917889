"""Tokenizers of models that runs start from."""

import pytest

from glassformer.config import ConfigError
from glassformer.training.data.tokenizer import ByteTokenizer, CharTokenizer, from_json
from glassformer.training.tuning.tokens import extended, mask_token, new_tokens, own_tokenizer, same_tokenizer
from tests.training.tuning.models import CHARACTERS, character_model, word_tokenizer


def test_the_tokenizer_of_a_folder(tmp_path):
    folder = character_model(tmp_path / "model")
    own = own_tokenizer(folder)
    assert isinstance(own, CharTokenizer)
    assert own.characters == CHARACTERS
    assert same_tokenizer("char", own)
    assert same_tokenizer(str(folder), own)
    assert not same_tokenizer("byte", own)
    (tmp_path / "other.json").write_text(CharTokenizer("abc").to_json())
    assert not same_tokenizer(str(tmp_path / "other.json"), own)


@pytest.mark.parametrize("tokenizer", [CharTokenizer("abc"), ByteTokenizer()])
def test_added_tokens_get_the_next_ids(tokenizer):
    more = extended(tokenizer, ("<x>", "<y>"))
    n = tokenizer.vocab_size
    assert more.vocab_size == n + 2
    assert more.encode("ab<y>c<x>").tolist() == [*tokenizer.encode("ab"), n + 1, *tokenizer.encode("c"), n]
    with pytest.raises(ConfigError, match="has: leave it out"):
        extended(more, ("<x>",))


def test_an_ordinary_token_becomes_a_special_one_and_keeps_its_id():
    tokenizer = CharTokenizer("abc")
    more = extended(tokenizer, ("b", "<x>"))
    assert more.vocab_size == 4
    assert more.encode("ab<x>").tolist() == [0, 1, 3]
    assert {token.content for token in more.engine.get_added_tokens_decoder().values()} == {"b", "<x>"}
    assert new_tokens(tokenizer, ("b", "<x>")) == ["<x>"]


def test_the_mask_token(tmp_path):
    tokenizer = from_json((word_tokenizer(tmp_path) / "tokenizer.json").read_text())

    class Config:
        vocab_size = 61

    assert mask_token(tokenizer, Config) == 2
    Config.vocab_size = 4
    assert mask_token(CharTokenizer("abc"), Config) == 3
    Config.vocab_size = 9
    with pytest.raises(ConfigError, match="has no mask token"):
        mask_token(CharTokenizer("abc"), Config)
