"""The tokenizer of a model's folder, and texts it cannot encode."""

import pytest

import glassformer as gf
from glassformer.generation.tokenizer import encode_text, tokenizer_of
from glassformer.model import build


def test_a_loaded_model_has_the_tokenizer_of_its_folder():
    found = tokenizer_of(gf.load("bard"))
    assert encode_text(found, "ROMEO:") == gf.load_tokenizer("bard").encode("ROMEO:").ids


def test_a_model_that_was_built_or_whose_folder_has_none_has_no_tokenizer(tmp_path):
    model = build(gf.presets.nano(max_len=16))
    assert tokenizer_of(model) is None
    gf.save(model, tmp_path / "m")
    assert tokenizer_of(gf.load(tmp_path / "m")) is None
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer.*pass token ids"):
        tokenizer_of(gf.load(tmp_path / "m"))


def test_a_character_that_is_no_token_is_named():
    with pytest.raises(ValueError, match=r"'½' \(U\+00BD\), which is not one of the 65 tokens"):
        encode_text(gf.load_tokenizer("bard"), "to ½ be")
