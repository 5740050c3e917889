"""Pieces with scores: merges by score, bytes for unknown characters, special tokens."""

from glassformer.weights.tokenizer.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, USER, Pieces

TOKENS = ["<unk>", "<s>", "<|x|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
TYPES = [UNKNOWN, CONTROL, USER, *[BYTE] * 256, *[NORMAL] * 7]


def tokens(text, scores, **rules):
    tokenizer = Pieces(TOKENS, [0.0] * 259 + scores, TYPES, **rules).tokenizer()
    return tokenizer.encode(text).tokens


def test_the_higher_score_is_merged_first():
    assert tokens("abc", [0, 0, 0, 0, -1.0, -2.0, -9.0], prefix=False) == ["ab", "c"]
    assert tokens("abc", [0, 0, 0, 0, -2.0, -1.0, -9.0], prefix=False) == ["a", "bc"]


def test_the_space_in_front_bytes_and_special_tokens():
    scores = [0, 0, 0, 0, -1.0, -2.0, -0.5]
    assert tokens("ab", scores) == ["▁a", "b"]
    assert tokens(" ab", scores) == ["▁", "▁a", "b"]
    assert tokens("ab", scores, prefix=False) == ["ab"]
    assert tokens("é", scores, prefix=False) == ["<0xC3>", "<0xA9>"]
    assert tokens("c<|x|>a<s> a", scores) == ["▁", "c", "<|x|>", "a", "<s>", "▁a"]


def test_decoding_removes_the_space_in_front_only():
    tokenizer = Pieces(TOKENS, [0.0] * 266, TYPES).tokenizer()
    for text in ("ab c", " ab", "é", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
