"""Read the rows of a JSONL file for an evaluation: documents, multiple choice questions, or cloze rows.

A line is one JSON object. Its keys decide what it is, and all lines of a file must be of one kind:

    {"text": ...}                                   a document
    {"context": ..., "choices": [...], "answer": i}  a question; the answer is an index from 0, or one of the choices
    {"context": ..., "target": ...}                  a context whose continuation is predicted

Questions and cloze rows may have a `group`, such as the passage that they share: the rows of a group are correlated.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.evaluation.score import EvaluationError

KINDS: dict[str, tuple[str, ...]] = {
    "documents": ("text",),
    "questions": ("context", "choices", "answer"),
    "clozes": ("context", "target"),
}
"""Each kind of row and the keys that it has."""


@dataclass(frozen=True)
class Row:
    """A question or a cloze row, which is a question with one choice, the correct one."""

    context: str
    choices: tuple[str, ...]
    answer: int
    line: int
    group: str | None = None


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. Line breaks stay as they are."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read ({error.strerror}): give a text file or a JSONL file.") from None
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is not UTF-8 text (byte {error.start}): convert it.") from None


def read_rows(path: str | Path) -> tuple[str, list[Row] | list[str]]:
    """Return the kind of the rows of a JSONL file, and the rows; documents are texts."""
    kind, rows = "", list[Any]()
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise EvaluationError(f"{where} is not JSON ({error}): each line must be one JSON object.") from None
        found = _kind(data, where)
        if kind not in ("", found):
            raise EvaluationError(f"{where} is one of {found}, but the lines before are {kind}: use one kind per file.")
        kind = found
        rows.append(_text(data, "text", where) if kind == "documents" else _row(data, number, where))
    if not rows:
        raise EvaluationError(f"{path} has no rows: give at least one line with a JSON object.")
    grouped = sum(isinstance(row, Row) and row.group is not None for row in rows)
    if 0 < grouped < len(rows):
        raise EvaluationError(f"{grouped} of {len(rows)} rows of {path} have a group: give all rows one, or none.")
    return kind, rows


def _kind(data: Any, where: str) -> str:
    if isinstance(data, dict):
        for kind, keys in KINDS.items():
            if all(key in data for key in keys):
                return kind
    wanted = ", or ".join(" and ".join(map(repr, keys)) for keys in KINDS.values())
    held = f"has the keys {', '.join(map(repr, data))}" if isinstance(data, dict) else f"is {json.dumps(data)[:40]}"
    raise EvaluationError(f"{where} {held}: a row needs {wanted}.")


def _text(data: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(data[key], str):
        raise EvaluationError(f"{key} in {where} is {json.dumps(data[key])[:40]}: it must be a text.")
    return str(data[key])


def _row(data: dict[str, Any], number: int, where: str) -> Row:
    context = _text(data, "context", where)
    group = None if data.get("group") is None else str(data["group"])
    if "choices" not in data:
        return Row(context, (_text(data, "target", where),), 0, number, group)
    choices = data["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise EvaluationError(f"choices in {where} must be a list of at least two texts, none of them empty.")
    answer = data["answer"]
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise EvaluationError(
            f"answer in {where} is {json.dumps(data['answer'])[:40]}: it must be one of the choices, or an index from "
            f"0 to {len(choices) - 1}."
        )
    return Row(context, tuple(choices), answer, number, group)
