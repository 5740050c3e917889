"""JSONL files: what their rows are, and one sentence for each that is none of them."""

import json

import pytest

from glassformer.evaluation.rows import Row, read_rows, read_text
from glassformer.evaluation.score import EvaluationError

QUESTION = {"context": "1 + 1 =", "choices": ["2", "3"], "answer": 0}


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_the_keys_decide_the_kind(tmp_path):
    assert read_rows(write(tmp_path, {"text": "a\u2028b", "id": 3}, "", {"text": "c"})) == (
        "documents",
        ["a\u2028b", "c"],
    )
    kind, rows = read_rows(write(tmp_path, QUESTION, {**QUESTION, "answer": "3", "group": 7}.copy() | {"group": None}))
    assert kind == "questions"
    assert rows == [Row("1 + 1 =", ("2", "3"), 0, 1), Row("1 + 1 =", ("2", "3"), 1, 2)]
    kind, rows = read_rows(write(tmp_path, {"context": "a", "target": "b", "group": 7}))
    assert (kind, rows) == ("clozes", [Row("a", ("b",), 0, 1, "7")])


def test_a_byte_order_mark_and_raw_line_separators_do_no_harm(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\ufeff".encode() + '{"text": "a\u2028b"}\r\n'.encode())
    assert read_rows(path) == ("documents", ["a\u2028b"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((QUESTION, "{"), r"line 2 of .* is not JSON"),
        ((["a"],), r"line 1 of .* is \[\"a\"\]: a row needs 'text', or"),
        (({"question": "a"},), "has the keys 'question': a row needs"),
        (({"text": None},), "text in line 1 .* is null: it must be a text"),
        (({"text": "a"}, QUESTION), "line 2 .* is one of questions, but the lines before are documents"),
        (({**QUESTION, "choices": ["2"]},), "choices in line 1 .* at least two texts"),
        (({**QUESTION, "choices": ["2", ""]},), "none of them empty"),
        (({**QUESTION, "choices": "23"},), "must be a list"),
        (({**QUESTION, "answer": 2},), "answer in line 1 .* is 2: .* an index from 0 to 1"),
        (({**QUESTION, "answer": True},), "is true"),
        (({**QUESTION, "answer": "4"},), "one of the choices"),
        ((QUESTION, {**QUESTION, "group": 1}), "1 of 2 rows .* have a group"),
        (("", " "), "has no rows"),
    ],
)
def test_a_wrong_row_is_one_sentence_with_its_line(tmp_path, rows, words):
    with pytest.raises(EvaluationError, match=words) as raised:
        read_rows(write(tmp_path, *rows))
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_text(tmp_path / "nowhere.txt")
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    with pytest.raises(EvaluationError, match="is not UTF-8 text"):
        read_text(tmp_path / "binary.txt")
