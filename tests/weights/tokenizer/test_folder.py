"""The tokenizer of a folder is found in whatever file it is stored, with its special tokens and its chat template."""

import base64
import json

import pytest
import sentencepiece
from tokenizers import Tokenizer, models

from glassformer.weights import WeightsError
from glassformer.weights.folder import TOKENIZER_FILES, load_tokenizer
from glassformer.weights.tokenizer.folder import read_chat_template, read_tokenizer
from tests.weights.tokenizer.corpus import LINES


@pytest.fixture
def pieces(tmp_path):
    """A folder with the tokenizer.model of a Llama."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[:200]),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_no_tokenizer(tmp_path):
    assert read_tokenizer(tmp_path) is None
    assert read_chat_template(tmp_path) is None


def test_tokenizer_json_comes_first(pieces):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(pieces / "tokenizer.json"))
    assert load_tokenizer(pieces).get_vocab_size() == 1
    (pieces / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"tokenizer.json is not a tokenizer that"):
        load_tokenizer(pieces)
    (pieces / "tokenizer.json").unlink()
    assert load_tokenizer(pieces).get_vocab_size() == 400


def test_a_sentencepiece_model_gets_the_ends_of_its_family(pieces):
    tokenizer = read_tokenizer(pieces)
    bos, plain = tokenizer.token_to_id("<s>"), tokenizer.encode("the loop", add_special_tokens=False).ids
    assert tokenizer.encode("the loop").ids == [bos, *plain]
    (pieces / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert read_tokenizer(pieces).encode("the loop").ids == [*plain, tokenizer.token_to_id("</s>")]
    (pieces / "tokenizer_config.json").unlink()
    (pieces / "config.json").write_text('{"model_type": "qwen2"}')
    assert read_tokenizer(pieces).encode("the loop").ids == plain


def test_added_tokens_get_the_ids_of_the_config(pieces):
    added = {"400": {"content": "<|user|>", "special": True}, "1": {"content": "<s>", "special": True}}
    (pieces / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert 400 in read_tokenizer(pieces).encode("a<|user|>b").ids
    added["500"] = {"content": "<|late|>"}
    (pieces / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(WeightsError, match=r"'<\|late\|>' the id 500, but its vocabulary would give it 401"):
        read_tokenizer(pieces)


def test_a_tiktoken_file(tmp_path):
    lines = [base64.b64encode(bytes([i])) + b" %d" % i for i in range(256)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    assert read_tokenizer(tmp_path).encode("AB").ids == [65, 66]
    (tmp_path / "qwen.tiktoken").rename(tmp_path / "tokenizer.model")
    assert read_tokenizer(tmp_path).encode("AB").ids == [65, 66]
    assert {"qwen.tiktoken", "tokenizer.model", "chat_template.jinja"} <= set(TOKENIZER_FILES)


def test_chat_templates(tmp_path):
    several = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "C"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_chat_template(tmp_path) == "C"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A"}))
    assert read_chat_template(tmp_path) == "A"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    assert read_chat_template(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("E")
    assert read_chat_template(tmp_path) == "E"
