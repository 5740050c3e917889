"""Ranges of a file: together they are the file, wherever it is cut; errors name the line of the file."""

import itertools
import json
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from glassformer.training.data import corpus, reading
from glassformer.training.data.corpus import DataError, Document
from glassformer.training.data.reading import line_edge, row_texts, stream, text_edge
from glassformer.training.data.tokenizer import train_tokenizer
from tests.sampled import examples

WORDS = st.sampled_from(
    ["word", "é", "漢字", " ", "  ", "\n", "\n\n", "I'm", "9", "\r\n", "\u2028", "\u3000", "end.\n"]
)


def write(folder, content, name="x.txt"):
    (folder / name).write_bytes(content)
    return Document(name, folder / name)


@hypothesis.given(st.lists(WORDS, min_size=1, max_size=60), st.integers(1, 40), st.integers(1, 9), st.integers(1, 40))
@hypothesis.settings(max_examples=examples(60))
def test_ranges_of_a_text_are_the_text_and_encode_as_it_does(tmp_path_factory, words, size, chunk, window):
    text = "".join(words)
    document = write(tmp_path_factory.mktemp("x"), text.encode())
    tokenizer = train_tokenizer("bpe", [text], 280)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        patch.setattr(reading, "WINDOW", window)
        edges = [text_edge(document, at) for at in range(0, document.size + size, size)]
        parts = ["".join(document.read(*pair)) for pair in itertools.pairwise(edges)]
    assert edges == sorted(edges)
    assert "".join(parts) == text
    encoded = [int(token) for part in parts for token in tokenizer.encode(part)]
    assert encoded == tokenizer.encode(text).tolist()


@hypothesis.given(
    st.lists(st.text(max_size=9).filter(lambda t: "\0" not in t)), st.integers(1, 60), st.integers(1, 9), st.booleans()
)
@hypothesis.settings(max_examples=examples(60))
def test_ranges_of_rows_have_every_row_once(tmp_path_factory, texts, size, chunk, ended):
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n" * ended
    document = write(tmp_path_factory.mktemp("x"), content.encode("utf-8", "surrogatepass"), "x.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        found = [
            text
            for at in range(0, document.size, size)
            for _, text in row_texts(document, "text", at, min(at + size, document.size))
        ]
    assert found == texts


def test_edges_of_lines(tmp_path):
    document = write(tmp_path, b"ab\ncd\n\nef")
    assert [line_edge(document, at) for at in range(12)] == [0, 3, 3, 3, 6, 6, 6, 7, 9, 9, 9, 9]


def test_a_byte_order_mark_a_separator_of_lines_and_blank_lines_are_no_documents(tmp_path):
    document = write(tmp_path, '\ufeff{"text": "a\u2028b"}\r\n\n \n{"text": null}\n{"text": ""}'.encode(), "x.jsonl")
    assert [text for _, text in row_texts(document, "text")] == ["a\u2028b", "", ""]


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a', r"line 3, is not JSON \(Unterminated string starting at, column 10\)"),
        (b'{"text": "\xff"}', r"line 3, is not UTF-8 \(byte 11 of it\)"),
        (b"[1]", "line 3, is of type list: a row must be a JSON object"),
        (b'{"txt": "a", "b": 1}', "line 3, has no field 'text'; its fields are b, txt. Set data.field"),
        (b'{"text": 3}', "line 3: the field 'text' is of type int; it must be a text"),
        (b'{"text": "a\\u0000"}', "line 3: the field 'text' has a NUL character"),
    ],
)
def test_a_broken_line_is_one_sentence_with_its_number(tmp_path, line, words, begin):
    document = write(tmp_path, b'{"text": "first"}\n{"text": "second"}\n' + line + b"\n", "x.jsonl")
    with pytest.raises(DataError, match=words) as refused:
        list(row_texts(document, "text", begin))
    assert str(refused.value).startswith(str(tmp_path / "x.jsonl"))
    assert re.search(r"[^.]\.$", str(refused.value))


def test_a_field_may_be_nested(tmp_path):
    document = write(tmp_path, b'{"a": {"b": "deep"}}\n{"a": null}\n', "x.jsonl")
    assert [text for _, text in row_texts(document, "a.b")] == ["deep", ""]
    with pytest.raises(DataError, match=r"line 1, has no field 'a\.c'; its fields are a"):
        list(row_texts(document, "a.c"))


def test_a_tokenizer_reads_every_kth_row(tmp_path):
    rows = "".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(10))
    document = write(tmp_path, rows.encode(), "x.jsonl")
    assert list(stream([document], "text", every=4)) == ["t0", "t4", "t8", "\n"]
