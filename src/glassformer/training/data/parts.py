"""Parts of a corpus, and the jobs that turn each into token files. Jobs and results are JSON.

`python -m glassformer.training.data.parts` is a process that does jobs: one per line of its input, one result per line
of its output. A job names its files, so that it can be done anywhere and again; its result depends on nothing else.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from glassformer.errors import GlassformerError
from glassformer.files import write_atomically
from glassformer.training.data import tokenizer as tok
from glassformer.training.data.corpus import DataError, Document
from glassformer.training.data.reading import row_texts, text_edge
from glassformer.training.data.tokenizer import Tokenizer, UnknownCharacter

Job = dict[str, Any]
Span = dict[str, Any]
"""A byte range of a file: its number, path (or content), name, bytes, changed; begin, end. Encoding also needs `cut`,
the number of characters that are for training, and `joined`, whether a separator follows."""
SPLITS = ("train", "val")
SHARE = 8
"""Bytes of a token file, at most, for each byte of the text it was made of. A token takes 4 bytes or less, and a
document of one byte two tokens."""


def divide(documents: Sequence[Document], size: int, ends: Sequence[int] = ()) -> list[list[Span]]:
    """Return the parts of a corpus, of about `size` bytes each: a function of the files in front of each part only.

    Files that are appended leave earlier parts as they are if `ends` has the number of files that there were before.
    """
    parts: list[list[Span]] = [[]]
    room = size
    for number, document in enumerate(documents):
        whole = {"file": number, "path": None if document.path is None else str(document.path.resolve())}
        whole |= {"name": document.name, "bytes": document.size, "changed": document.changed}
        whole |= {"content": None if document.content is None else document.content.decode()}
        at, step = 0, size if document.divisible else document.size
        while at < document.size:
            if room <= 0 or (at == 0 and number in ends and parts[-1]):
                parts.append([])
                room = size
            end = min(at + (min(room, step) if document.divisible else step), document.size)
            parts[-1].append(whole | {"begin": at, "end": end})
            room -= end - at
            at = end
    return parts


def document_of(span: Span) -> Document:
    if span["content"] is not None:
        return Document(span["name"], content=span["content"].encode())
    return Document(span["name"], Path(span["path"]))


def span_texts(span: Span, field: str) -> Iterator[str]:
    """The texts of a range: pieces of a text, or those of rows."""
    document = document_of(span)
    if document.has_rows:
        return (text for _, text in row_texts(document, field, span["begin"], span["end"]))
    return document.read(*_range(document, span))


def _range(document: Document, span: Span) -> tuple[int, int | None]:
    if not document.divisible:
        return 0, None
    return text_edge(document, span["begin"]), text_edge(document, span["end"])


def check_unchanged(spans: Sequence[Span]) -> None:
    for span in spans:
        document = document_of(span)
        try:
            same = (document.size, document.changed) == (span["bytes"], span["changed"])
        except OSError:
            same = False
        if not same:
            raise DataError(f"{document.label} changed while it was read: prepare it again when it is finished.")


# jobs


def hash_file(job: Job) -> Any:
    """Return the SHA-256 of a file."""
    return document_of(job["span"]).hash()


def scan(job: Job) -> Any:
    """Return the number of characters of each range, and the characters that occur, if they are wanted."""
    counts, seen = [], tok.Alphabet()
    for span in job["spans"]:
        count = 0
        for text in span_texts(span, job["field"]):
            count += len(text)
            if job["alphabet"]:
                seen.add(text)
        counts.append(count)
    check_unchanged(job["spans"])
    return {"characters": counts, "alphabet": seen.characters() if job["alphabet"] else ""}


def encode(job: Job) -> Any:
    """Write the token files of a part into the folder `out`, and a record of them. Return the record.

    A finished part has its record; it is written last.
    """
    tokenizer = tok.load(job["tokenizer"])
    record: dict[str, Any] = {"characters": [], "documents": 0, "empty": 0}
    with ExitStack() as stack:
        writers = [Writer(Path(job["out"]), f"{job['key']}-{split}", tokenizer, job["limit"]) for split in SPLITS]
        for writer in writers:
            stack.callback(writer.abandon)
        for span in job["spans"]:
            document = document_of(span)
            write = _encode_rows if document.has_rows else _encode_text
            record["characters"].append(write(document, span, tokenizer, writers, job, record))
        check_unchanged(job["spans"])
        for split, writer in zip(SPLITS, writers, strict=True):
            record[split] = writer.close()
    write_atomically(Path(job["out"]) / f"{job['key']}.json", json.dumps(record).encode())
    return record


def _encode_text(
    document: Document, span: Span, tokenizer: Tokenizer, writers: list["Writer"], job: Job, record: Job
) -> list[int]:
    """Write a range of a text: characters before `cut` are for training. Return the characters of each split."""
    begin, end = _range(document, span)
    counts, at, lines = [0, 0], 0, 0
    for text, in_val in _pieces(document.read(begin, end), tokenizer, span["cut"]):
        try:
            writers[in_val].write(tokenizer.encode(text))
        except UnknownCharacter as error:
            before = "".join(document.read(0, begin)) if begin else ""
            raise error.at(document.label, at + len(before), lines + before.count("\n")) from None
        counts[in_val] += len(text)
        at += len(text)
        lines += text.count("\n")
    if span["joined"]:  # the separator belongs to the document that it ends
        writers[at > span["cut"]].write(_separator(tokenizer))
    record["documents"] += span["end"] == span["bytes"]
    return counts


def _pieces(texts: Iterator[str], tokenizer: Tokenizer, cut: int) -> Iterator[tuple[str, bool]]:
    """A text in pieces that can be encoded one by one, none across `cut`, each with whether it lies behind it."""
    pending, at = "", 0
    for text in texts:
        pending += text
        if at < cut < at + len(pending):
            yield pending[: cut - at], False
            pending, at = pending[cut - at :], cut
        if n := tokenizer.cut(pending):
            yield pending[:n], at >= cut
            pending, at = pending[n:], at + n
    if pending:
        yield pending, at >= cut


def _encode_rows(
    document: Document, span: Span, tokenizer: Tokenizer, writers: list["Writer"], job: Job, record: Job
) -> list[int]:
    """Write the documents of rows, each with a separator at its end. Its content decides which split it belongs to."""
    counts, separator = [0, 0], _separator(tokenizer)
    for place, text in row_texts(document, job["field"], span["begin"], span["end"]):
        if not text:
            record["empty"] += 1
            continue
        in_val = is_validation(text, job["fraction"])
        try:
            ids = tokenizer.encode(text)
        except UnknownCharacter as error:
            raise error.at(str(place), 0, 0) from None
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        writers[in_val].write(ids)
        writers[in_val].write(separator)
        counts[in_val] += len(text)
        record["documents"] += 1
    return counts


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is for validation: its hash, as a number from 0 to 1, is below the fraction."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _separator(tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.end_of_text is not None:
        return np.array([tokenizer.end_of_text], tokenizer.dtype)
    try:
        return tokenizer.encode("\n")
    except DataError:
        raise DataError(
            "the documents of a folder are joined by a newline, which the given tokenizer does not know: use another "
            "tokenizer, or join them in one file yourself."
        ) from None


class Writer:
    """Token files of a split, each of at most `limit` bytes: written under a temporary name, verified, renamed."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, limit: int) -> None:
        self.folder, self.name = folder, name
        self.width = np.dtype(tokenizer.dtype).itemsize
        self.room = limit // self.width
        """Tokens of a file."""
        self.done: list[dict[str, Any]] = []
        self.file: BinaryIO | None = None
        self.count = 0

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self.file is None:
                self.temporary = self.folder / f".{self.name}-{len(self.done)}.{os.getpid()}"
                self.file, self.digest, self.count = self.temporary.open("wb"), hashlib.sha256(), 0
            now, ids = ids[: self.room - self.count], ids[self.room - self.count :]
            data = now.tobytes()
            self.file.write(data)
            self.digest.update(data)
            self.count += len(now)
            if self.count == self.room:
                self._finish()

    def _finish(self) -> None:
        if self.file is None:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None
        expected = self.digest.hexdigest()
        if Document(self.name, self.temporary).hash() != expected:
            raise DataError(f"{self.temporary} is not what was written to it: the disk is damaged.")
        final = self.folder / f"{self.name}-{len(self.done)}.bin"
        os.replace(self.temporary, final)
        self.done.append({"file": final.name, "tokens": self.count, "sha256": expected})

    def close(self) -> list[dict[str, Any]]:
        self._finish()
        return self.done

    def abandon(self) -> None:
        """Remove a file that was not finished."""
        if self.file is not None:
            self.file.close()
            self.temporary.unlink(missing_ok=True)


KINDS = {"hash": hash_file, "scan": scan, "encode": encode}


def do(job: Job) -> Any:
    """Return the result of a job."""
    return KINDS[job["kind"]](job)


def main() -> int:
    """Do the jobs of standard input until it ends; also without a process that reads the answer, which was killed."""
    for line in sys.stdin:
        try:
            answer = {"result": do(json.loads(line))}
        except OSError as error:
            answer = {"system": [error.errno, error.strerror or str(error)]}
        except GlassformerError as error:
            answer = {"error": str(error)}
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:
            os._exit(1)  # Python would fail again when it flushes its output
    return 0


if __name__ == "__main__":
    sys.exit(main())
