"""tiktoken files give the same tokens as tiktoken itself."""

import base64
import json

import pytest
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from glassformer.weights import WeightsError
from glassformer.weights.tokenizer.ranks import is_ranks, read_ranks
from glassformer.weights.tokenizer.splits import byte_signs
from tests.weights.tokenizer.corpus import HARD, LINES, TEXT

# The expressions as tiktoken has them, with possessive quantifiers and case flags.
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "cl100k_base.tiktoken": CL100K,
    "o200k_base.tiktoken": O200K,
    "gpt2.tiktoken": R50K,
    "tokenizer.model": LLAMA3,
    "qwen.tiktoken": LLAMA3.replace("{1,3}", ""),
}


@pytest.fixture(scope="module")
def ranks():
    """Bytes in the order of their values, then merges, as tiktoken's own training gives them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(LINES, trainer)
    byte = {sign: i for i, sign in enumerate(byte_signs())}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    made = [bytes(byte[sign] for sign in "".join(merge)) for merge in merges]
    return {token: i for i, token in enumerate(dict.fromkeys([bytes([i]) for i in range(256)] + made))}


def written(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


@pytest.mark.parametrize("name", PATTERNS)
def test_tokens_and_texts_are_those_of_tiktoken(tmp_path, ranks, name):
    ours = read_ranks(written(tmp_path / name, ranks))
    theirs = tiktoken.Encoding("x", pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
    for text in [*HARD, *(TEXT[i : i + 200] for i in range(0, 20000, 199)), "WE'LL I'Ll x's \r\n\r\n  a  \n  b   "]:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == text


def test_the_first_line_decides(tmp_path, ranks):
    assert is_ranks(written(tmp_path / "tokenizer.model", ranks))
    for content in (b"\n\x0e\n\x05<unk>", b"", b"hello world\n", b"aGk= x\n"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        assert not is_ranks(tmp_path / "tokenizer.model")


def test_files_that_cannot_be_read(tmp_path, ranks):
    with pytest.raises(WeightsError, match="known for the names gpt2, r50k_base"):
        read_ranks(written(tmp_path / "mine.tiktoken", ranks))
    with pytest.raises(WeightsError, match="lacks 1 of the 256 bytes, the smallest 7"):
        read_ranks(written(tmp_path / "gpt2.tiktoken", {t: r for t, r in ranks.items() if t != b"\x07"}))
    (tmp_path / "gpt2.tiktoken").write_text("aGk= 1\nno base64\n")
    with pytest.raises(WeightsError, match="not a tiktoken file"):
        read_ranks(tmp_path / "gpt2.tiktoken")
