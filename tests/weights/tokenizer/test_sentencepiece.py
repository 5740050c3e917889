"""sentencepiece models give the same tokens as sentencepiece itself."""

import pytest
import sentencepiece

from glassformer.weights import WeightsError
from glassformer.weights.tokenizer.sentencepiece import read_sentencepiece
from tests.weights.tokenizer.corpus import HARD, LINES, TEXT

RULES = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe-no-prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "split_digits": True},
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
}
# Llama's and Gemma's models keep all spaces, T5's removes them.
SPACES = {"bpe": False, "bpe-no-prefix": False, "unigram": True, "unigram-bytes": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    for name, rules in RULES.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_prefix=str(folder / name),
            vocab_size=700,
            user_defined_symbols=["<|user|>"],
            remove_extra_whitespaces=SPACES[name],
            num_threads=1,
            minloglevel=2,
            **rules,
        )
    return folder


@pytest.mark.parametrize("name", RULES)
def test_tokens_and_texts_are_those_of_sentencepiece(trained, name):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(trained / f"{name}.model"))
    ours = read_sentencepiece(trained / f"{name}.model").tokenizer()
    texts = [*HARD, *(TEXT[i : i + 200] for i in range(0, 20000, 199)), "hello<|user|> there<|user|>you"]
    assert ours.get_vocab_size() == theirs.vocab_size()
    different = 0
    for text in texts:
        ids = ours.encode(text).ids
        expected = theirs.encode(text)
        if name.startswith("unigram"):  # two orders of the same pieces have the same score: `----` as 3 + 1 or 1 + 3
            assert sorted(ids) == sorted(expected), text
            different += ids != expected
        else:
            assert ids == expected, text
        assert ours.decode(ids) == theirs.decode(ids).replace(" ⁇ ", ""), text
    assert different <= 0.1 * len(texts)


def test_files_that_are_no_models(trained, tmp_path):
    file = tmp_path / "tokenizer.model"
    for content in (b"hello", b"", (trained / "bpe.model").read_bytes()[:100]):
        file.write_bytes(content)
        with pytest.raises(WeightsError) as refused:
            read_sentencepiece(file)
        assert "\n" not in str(refused.value)
        assert str(file) in str(refused.value)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(tmp_path / "c"), model_type="char", vocab_size=80, minloglevel=2
    )
    with pytest.raises(WeightsError, match="only unigram and BPE"):
        read_sentencepiece(tmp_path / "c.model")


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(WeightsError, match="needs the packages sentencepiece and protobuf: run pip install"):
        read_sentencepiece(tmp_path / "tokenizer.model")
