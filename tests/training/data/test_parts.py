"""Parts of a corpus, and the process that does their jobs."""

import itertools
import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from glassformer.training.data import parts
from glassformer.training.data.corpus import DataError, Document
from glassformer.training.data.parts import divide, is_validation


class Sized(Document):
    """A document of which only the size is known."""

    def __init__(self, name, size, divisible):
        super().__init__(name, content=b"")
        self._size, self._divisible = size, divisible

    size = property(lambda self: self._size)
    divisible = property(lambda self: self._divisible)
    changed = property(lambda self: None)


@hypothesis.given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1), st.integers(1, 40), st.data())
def test_parts_cover_every_byte_once_and_files_that_are_added_change_no_part(files, size, data):
    documents = [Sized(str(i), *file) for i, file in enumerate(files)]
    found = divide(documents, size)
    covered = [(span["file"], span["begin"], span["end"]) for part in found for span in part]
    assert covered == sorted(covered)
    for number, (length, divisible) in enumerate(files):
        mine = [(begin, end) for file, begin, end in covered if file == number]
        assert mine[0][0] == 0
        assert mine[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
        assert divisible or len(mine) == 1
    for part in found[:-1]:
        assert sum(span["end"] - span["begin"] for span in part) >= size
    before = data.draw(st.integers(1, len(files)))
    earlier = divide(documents[:before], size)
    assert divide(documents, size, [before])[: len(earlier)] == earlier


def test_documents_are_divided_by_their_content_in_the_given_fraction():
    texts = [f"document {i}" for i in range(20_000)]
    count = sum(is_validation(text, 0.1) for text in texts)
    assert abs(count - 2000) < 170  # 4 standard deviations of 42
    assert not any(is_validation(text, 0.0) for text in texts)
    assert all(is_validation(text, 0.2) for text in texts if is_validation(text, 0.1))


def test_a_process_answers_each_job_and_reports_what_is_wrong(tmp_path):
    (tmp_path / "x.txt").write_text("abc\nabé\n", encoding="utf-8")
    (part,) = divide([Document("x.txt", tmp_path / "x.txt")], 100)
    (broken,) = divide([Document("x.txt", tmp_path / "x.txt")], 100)
    jobs = [
        {"kind": "hash", "span": part[0]},
        {"kind": "scan", "spans": part, "field": "text", "alphabet": True},
        {"kind": "scan", "spans": [broken[0] | {"changed": 1}], "field": "text", "alphabet": False},
        {"kind": "hash", "span": part[0] | {"path": str(tmp_path / "none")}},
    ]
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run(
        [sys.executable, "-m", parts.__name__], input=lines, capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0] == {"result": Document("x", tmp_path / "x.txt").hash()}
    assert answers[1] == {"result": {"characters": [8], "alphabet": "\nabcé"}}
    assert "changed while it was read" in answers[2]["error"]
    assert "none cannot be read" in answers[3]["error"]


def test_a_token_file_that_the_disk_did_not_keep_is_refused(tmp_path, monkeypatch):
    tokenizer = parts.tok.ByteTokenizer()
    writer = parts.Writer(tmp_path, "x", tokenizer, 100)
    writer.write(tokenizer.encode("abc"))
    monkeypatch.setattr(parts.Document, "hash", lambda document: "0")
    with pytest.raises(DataError, match="is not what was written to it"):
        writer.close()
