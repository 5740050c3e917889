"""Texts of a corpus by byte ranges: where a range may begin, and what is in it.

A long file is read in ranges by several processes. A range begins at the first safe position at or after its first
byte, and ends where the next one begins. In a text, a position is safe if it encodes the same with and without what
stands before it (`tokenizer.first_cut`); in JSONL, at the begin of a line.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from glassformer.chat.errors import ChatError
from glassformer.chat.rows import BOM, as_object, lines, parse, read_arrow
from glassformer.chat.rows import suffix as data_suffix
from glassformer.training.data.corpus import DataError, Document
from glassformer.training.data.tokenizer import first_cut

WINDOW = 1 << 16
"""Bytes in which a safe position is looked for at first."""


def text_edge(document: Document, at: int) -> int:
    """Return the first safe position after byte `at` of a text: its end if there is none.

    It grows with `at`. A position between lines is preferred; without one within 4 windows, one between words will do.
    """
    size = document.size
    if at <= 0 or at >= size:
        return max(0, min(at, size))
    with document.open() as file:
        width = WINDOW
        while True:
            file.seek(at)
            data = file.read(width)
            first = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)  # begin of a character
            # a character that the window cuts is left out; what is not UTF-8 is reported by the process that reads it
            text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(data[first:])
            if cut := first_cut(text, far=width > 4 * WINDOW):
                return at + first + len(text[:cut].encode("utf-8", "surrogateescape"))
            if at + len(data) >= size:
                return size
            width *= 2


def line_edge(document: Document, at: int) -> int:
    """Return the begin of the first line at or after byte `at` of a file: its end if there is none."""
    size = document.size
    if at <= 0 or at >= size:
        return max(0, min(at, size))
    before = at - 1
    for data in document.read_bytes(before):
        if (found := data.find(b"\n")) >= 0:
            return before + found + 1
        before += len(data)
    return size


@dataclass(frozen=True)
class Place:
    """A row in an error message: `data.jsonl, line 3`. Lines before a range are only counted for an error."""

    document: Document
    begin: int
    number: int

    def __str__(self) -> str:
        earlier = sum(data.count(b"\n") for data in self.document.read_bytes(0, self.begin)) if self.begin else 0
        return f"{self.document.label}, line {self.number + earlier}"


def row_texts(document: Document, field: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[Any, str]]:
    """Yield the text of each row and its place, of a JSONL file from `begin` to `end`, or of a whole Parquet file.

    A row whose text is null gives an empty text. Raises DataError for a row without the field or with something else in
    it, with its line number.
    """
    try:
        if document.path is not None and data_suffix(document.path) not in (".jsonl", ".json"):
            for row in read_arrow(document.path, field):
                yield row.place, field_text(row.value, field, row.place, required=False)
            return
        first = line_edge(document, begin) if document.divisible else 0
        last = line_edge(document, end) if document.divisible and end is not None else None
        held = document.read_bytes(first, last)
        start = next(held, b"")
        for number, line in enumerate(lines(start if first else start.removeprefix(BOM), held), 1):
            if line.strip():
                place = Place(document, first, number)
                yield place, field_text(as_object(parse(line, place), place), field, place)
    except ChatError as error:
        raise DataError(str(error)) from None


def field_text(value: dict[str, Any], field: str, place: object, required: bool = True) -> str:
    """Return the text of a field of a row; `a.b` is the field b of the object a."""
    held: Any = value
    for name in field.split("."):
        if isinstance(held, dict) and name not in held and not required:
            return ""
        if not isinstance(held, dict) or name not in held:
            known = ", ".join(sorted(map(str, value))) or "none"
            raise DataError(f"{place}, has no field {field!r}; its fields are {known}. Set data.field to one of them.")
        held = held[name]
        if held is None:
            return ""
    if not isinstance(held, str):
        raise DataError(f"{place}: the field {field!r} is of type {type(held).__name__}; it must be a text.")
    if "\0" in held:
        raise DataError(f"{place}: the field {field!r} has a NUL character, which text has not: remove the row.")
    return held


def stream(documents: Sequence[Document], field: str, every: int = 1) -> Iterator[str]:
    """Yield all the text, or every k-th megabyte of texts and every k-th row: what a tokenizer is trained on."""
    count = 0
    for document in documents:
        texts = (text for _, text in row_texts(document, field)) if document.has_rows else document.read()
        for text in texts:
            if count % every == 0 and text:
                yield text
            count += 1
    if len(documents) > 1 or documents[0].has_rows:
        yield "\n"  # joins them
