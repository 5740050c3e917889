"""Rows of data files, one at a time, each with the place where it was found.

| path | read by |
|---|---|
| `.jsonl`, `.json` (one object per line, or one array), also `.gz` and `.zst` | the standard library; `zstandard` |
| `.parquet`, `.arrow` | `pyarrow` |
| a folder of `datasets.save_to_disk` | `pyarrow` |
| a folder of such files | the files for training, in the order of their names |

JSON is read line by line and split at "\\n" only: U+2028 is part of a text.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from glassformer.chat.errors import ChatError
from glassformer.errors import install, listing

JSON, COMPRESSED, ARROW = (".jsonl", ".json"), (".gz", ".zst"), (".parquet", ".arrow")
CHUNK = 1 << 20
"""Bytes that are read at a time; of a compressed file fewer, because they may become a thousand times as many."""
BATCH = 256
"""Rows of a Parquet or Arrow file that are converted at a time."""
BOM = b"\xef\xbb\xbf"
SPLITS = ("train", "validation", "valid", "val", "test")


@dataclass(frozen=True)
class Row:
    """One row and its place, such as `data.jsonl, line 3`."""

    value: dict[str, Any]
    place: str


def read_rows(path: str | Path, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a file or a folder. A folder with several splits is read for `split` only."""
    path = Path(path).expanduser()
    if path.is_dir():
        for file in split_files(path, split):
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    else:
        raise ChatError(f"{path} does not exist: give a JSONL or Parquet file, or a folder of them.")


def is_data_file(path: Path) -> bool:
    """Return whether the name of a file says that it holds rows, one JSON object per line, or in Parquet or Arrow."""
    return suffix(path) in JSON[:1] or path.suffix.lower() in ARROW


def suffix(path: Path) -> str:
    """Return the suffix, without that of a compression."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def split_files(folder: Path, split: str = "train", nested: bool = False) -> list[Path]:
    """Return the files of a folder that hold a split; with `nested`, also those in its visible subfolders."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json_file(folder / "dataset_dict.json").get("splits")
        known = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        if split not in known:
            raise ChatError(f"{folder} has no split {split!r}: give the folder of one of its splits, {listing(known)}.")
        folder = folder / split
    if (folder / "state.json").is_file():
        listed = _json_file(folder / "state.json").get("_data_files")
        names = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ChatError(f"{folder / 'state.json'} does not name the files of a dataset: save it again.")
        return [folder / str(name) for name in names]
    held = folder.rglob("*") if nested else folder.iterdir()
    found = sorted(file for file in held if is_data_file(file) and file.is_file() and not _is_hidden(file, folder))
    if not found:
        raise ChatError(
            f"{folder} has no .jsonl, .parquet or .arrow file and is not a saved dataset: give a folder that has."
        )
    by_split = {name: [file for file in found if file.name.startswith(name)] for name in SPLITS}
    return by_split.get(split) or ([] if any(by_split.values()) else found) or _no_split(folder, split)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(name.startswith(".") for name in file.relative_to(folder).parts)


def _no_split(folder: Path, split: str) -> list[Path]:
    raise ChatError(f"{folder} has files of other splits than {split!r}: give one of its files.")


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} is not readable JSON ({error}): save the dataset again.") from None
    return value if isinstance(value, dict) else {}


def _read_file(path: Path) -> Iterator[Row]:
    try:
        if suffix(path) in JSON:
            yield from _read_json(path)
        elif path.suffix.lower() in ARROW:
            yield from read_arrow(path)
        else:
            known = ", ".join((*JSON, *(f".jsonl{end}" for end in COMPRESSED), *ARROW))
            raise ChatError(f"{path} is not a data file that is known by its name: use one of {known}.")
    except OSError as error:
        raise ChatError(f"{path} cannot be read ({error.strerror or error}): give another file.") from None


# JSON


def _read_json(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        found = chunks(path, file)
        first = next((chunk for chunk in found if chunk), b"").removeprefix(BOM)
        if suffix(path) == ".json" and first.lstrip()[:1] == b"[":
            yield from _read_array(path, first + b"".join(found))
            return
        for number, line in enumerate(lines(first, found), 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            yield Row(as_object(parse(line, place), place), place)


def _read_array(path: Path, data: bytes) -> Iterator[Row]:
    for number, value in enumerate(parse(data, str(path)), 1):
        place = f"{path}, entry {number}"
        yield Row(as_object(value, place), place)


def parse(data: bytes, place: object) -> Any:
    """Return the value of JSON. `place` names the data in an error; its text is only made for one."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ChatError(f"{place}, is not UTF-8 (byte {error.start + 1} of it): convert the file.") from None
    except json.JSONDecodeError as error:
        raise ChatError(f"{place}, is not JSON ({error.msg}, column {error.colno}): correct it.") from None
    except RecursionError:
        raise ChatError(f"{place}, is nested too deeply: a row is an object of texts and lists.") from None


def as_object(value: Any, place: object) -> dict[str, Any]:
    """Return a row, which must be a JSON object."""
    if not isinstance(value, dict):
        raise ChatError(f"{place}, is of type {type(value).__name__}: a row must be a JSON object.")
    return value


def lines(first: bytes, more: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream of bytes, without their "\\n"."""
    waiting: list[bytes] = []
    data: bytes | None = first
    while data is not None:
        *whole, rest = data.split(b"\n")
        for part in whole:
            yield b"".join((*waiting, part))
            waiting = []
        waiting.append(rest)
        data = next(more, None)
    yield b"".join(waiting)


def chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed by its suffix. Several members or frames follow one another."""
    make = _decompressor(path)
    if make is None:
        while data := file.read(CHUNK):
            yield data
        return
    one, offset = make(), 0
    ended = True
    while data := file.read(CHUNK >> 4):
        offset += len(data)
        while data:
            if one.eof:
                one = make()
            try:
                yield one.decompress(data)
            except Exception as error:  # zlib.error, zstandard.ZstdError
                raise ChatError(
                    f"{path} is damaged before byte {offset} of the compressed file ({error}): copy it again."
                ) from None
            data, ended = one.unused_data, one.eof
    if not ended:
        raise ChatError(f"{path} ends in the middle of its compressed data, at byte {offset}: copy it again.")


def _decompressor(path: Path) -> Callable[[], Any] | None:
    match path.suffix.lower():
        case ".gz":
            return lambda: zlib.decompressobj(wbits=31)
        case ".zst":
            try:
                import zstandard
            except ImportError:
                raise ChatError(f"{path} needs the package zstandard: {install('data')}.") from None
            return lambda: zstandard.ZstdDecompressor().decompressobj()
        case _:
            return None


# Parquet and Arrow


def read_arrow(path: Path, column: str | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file; with `column`, this column only (`a.b` is field b of column a)."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ChatError(f"{path} needs the package pyarrow: {install('data')}.") from None
    number = 0
    try:
        if path.suffix.lower() == ".parquet":
            file = parquet.ParquetFile(path)
            _check_column(path, column, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=BATCH, columns=None if column is None else [column])
        else:
            batches = _arrow_batches(arrow, path)
        for batch in batches:
            if column is not None:
                _check_column(path, column, batch.schema.names)
                batch = batch.select([column.partition(".")[0]])
            for start in range(0, batch.num_rows, BATCH):
                for value in batch.slice(start, BATCH).to_pylist():
                    number += 1
                    yield Row({key: held for key, held in value.items() if held is not None}, f"{path}, row {number}")
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ChatError(f"{path} is not a whole Parquet or Arrow file ({reason}): copy it again.") from None


def _check_column(path: Path, column: str | None, known: list[str]) -> None:
    if column is not None and column.partition(".")[0] not in known:
        raise ChatError(
            f"{path} has no column {column!r}: it has {listing(known, 'and')}. Set data.field to one of them."
        )


def _arrow_batches(arrow: Any, path: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file in the stream format, which `datasets` writes, or the file format."""
    with arrow.memory_map(str(path)) as source:
        try:
            reader = arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:
            reader = arrow.ipc.open_file(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            return
        yield from reader
