"""Texts as documents: tokens, and the bytes at which they end."""

import numpy as np
import pytest

from glassformer.evaluation.score import EvaluationError
from glassformer.evaluation.text import encode, read_documents
from tests import folders
from tests.evaluation.test_cross_entropy import characters


@pytest.mark.parametrize("size", [256, 300])
@pytest.mark.parametrize("text", ["the cat", "äöü", "猫が座った。", "a\r\n b\t", " 😀x", ""])
def test_the_ends_of_tokens_are_those_of_their_bytes(text, size):
    tokenizer = folders.tokenizer(size)
    document = encode(tokenizer, text)
    lengths = [len(tokenizer.id_to_token(id)) for id in document.tokens.tolist()]  # a byte is one character there
    assert document.ends.tolist() == pytest.approx(np.cumsum(lengths), abs=0 if size == 256 else 3)
    assert (np.diff(document.ends) >= 0).all()
    assert document.ends[-1:].tolist() == ([len(text.encode())] if text else [])


def test_what_a_tokenizer_drops_still_counts():
    from tokenizers import normalizers

    tokenizer = characters("ab")
    tokenizer.normalizer = normalizers.Strip()
    assert encode(tokenizer, " ab  ").ends.tolist() == [2, 5]


def test_an_unknown_character_is_named_with_its_line():
    with pytest.raises(EvaluationError, match=r"'½' \(U\+00BD\) in line 2, which is not one of the 3 tokens"):
        encode(characters("ab\n"), "ab\na½")


def test_unknown_tokens_are_reported():
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    documents, notes = read_documents(["ab", "ba"], tokenizer)
    assert [document.tokens.tolist() for document in documents] == [[0, 1], [1, 0]]
    assert "2 tokens of the text are <unk>" in notes[0]
