import gzip
import json
import sys

import pytest

from glassformer.chat.errors import ChatError
from glassformer.chat.rows import read_rows

ROWS = [{"text": "one"}, {"text": "two\u2028three"}, {"text": "naïve 猫", "n": [1, {"a": None}]}]
LINES = b"\xef\xbb\xbf" + "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode() + b"\n\n"
PLAIN = [{"text": row["text"]} for row in ROWS]


def values(path, **more):
    return [row.value for row in read_rows(path, **more)]


def write(path, data):
    path.write_bytes(data)
    return path


def compress(data):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(data)


def test_json_lines_in_four_containers(tmp_path):
    assert values(write(tmp_path / "a.jsonl", LINES)) == ROWS
    assert values(write(tmp_path / "a.json", LINES)) == ROWS
    assert values(write(tmp_path / "b.json", json.dumps(ROWS, indent=1).encode())) == ROWS
    half = LINES[:40], LINES[40:]
    members = b"".join(gzip.compress(part, mtime=0) for part in half)
    assert values(write(tmp_path / "a.jsonl.gz", members)) == ROWS
    frames = b"".join(compress(part) for part in half)
    assert values(write(tmp_path / "a.jsonl.zst", frames)) == ROWS
    assert values(write(tmp_path / "A.JSONL", LINES)) == ROWS


def test_places_count_the_lines_of_the_file(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{}\n\n{"a": 1}\r\n')
    assert [row.place for row in read_rows(path)] == [f"{path}, line 1", f"{path}, line 3"]


def test_parquet_arrow_and_saved_datasets(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table({"text": arrow.array([row["text"] for row in ROWS]).dictionary_encode()})
    parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet", row_group_size=2)
    parquet.write_table(table.slice(0, 1), tmp_path / "test-00000-of-00001.parquet")
    assert values(tmp_path) == PLAIN
    assert values(tmp_path, split="test") == PLAIN[:1]
    assert values(tmp_path / "train-00000-of-00001.parquet") == PLAIN
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(PLAIN)
    made.save_to_disk(tmp_path / "saved", num_shards=2)
    assert values(tmp_path / "saved") == PLAIN
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(tmp_path / "dict")
    assert values(tmp_path / "dict") == PLAIN
    assert values(tmp_path / "dict", split="test") == PLAIN[1:2]
    with pytest.raises(ChatError, match="no split 'nothing': give the folder of one of its splits, train or test"):
        values(tmp_path / "dict", split="nothing")


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2,}\n', r"line 2, is not JSON \(.*, column \d+\)"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2, is of type list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"line 2, is not UTF-8 \(byte 8"),
        ("a.jsonl", b"[" * 100000, "line 1, is n"),
        ("a.json", b"[1]", "entry 1, is of type int"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-12], "ends in the middle of its compressed data, at byte "),
        ("a.jsonl.gz", b"no gzip at all", "is damaged before byte 14"),
        ("a.jsonl.zst", None, "ends in the middle of its compressed data"),
        ("a.csv", b"a,b", "is not a data file that is known by its name"),
        ("a.parquet", b"PAR1nothing", "is not a whole Parquet or Arrow file"),
        ("a.arrow", b"nothing", "is not a whole Parquet or Arrow file"),
    ],
)
def test_a_file_that_cannot_be_read_gives_one_sentence_with_its_place(tmp_path, name, data, sentence):
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    path = write(tmp_path / name, compress(LINES * 100)[:-4] if data is None else data)
    with pytest.raises(ChatError, match=sentence) as caught:
        values(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_data(tmp_path):
    with pytest.raises(ChatError, match="does not exist: give a JSONL or Parquet file"):
        values(tmp_path / "nothing")
    with pytest.raises(ChatError, match=r"has no .jsonl, .parquet or .arrow file and is not a saved dataset"):
        values(tmp_path)
    write(tmp_path / "state.json", b'{"_data_files": [{"filename": "../x.arrow"}]}')
    with pytest.raises(ChatError, match="does not name the files of a dataset"):
        values(tmp_path)


@pytest.mark.parametrize(("name", "module"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ChatError, match=rf"needs the package {module}: run pip install .*\[data\]"):
        values(write(tmp_path / name, b"x"))
