"""Course view: problems and exercises, answers that are checked, programs that are graded in a separate process."""

import tempfile
import threading
from pathlib import Path
from typing import Any

from glassformer.studio import schema
from glassformer.studio.errors import NotFoundError, StudioError
from glassformer.studio.mathml import pieces
from glassformer.theory import exercises
from glassformer.theory.course import Choice, CourseError, Formula, Problem, Task, course, notation
from glassformer.theory.course.expressions import UnreadableError, parse, to_sympy
from glassformer.theory.course.progress import Progress, load
from glassformer.theory.course.registry import Item, errata

SAVING = threading.Lock()
"""Requests run in several threads, and each reads and replaces the file of the progress."""


def outline() -> dict[str, Any]:
    """Return the items by topic and by source, with the progress. Needs no torch."""
    whole, kept = course(), load()
    items: list[Item] = [*whole.problems.values(), *whole.exercises.values()]
    entries = {
        item.id: {"title": item.title, "code": not isinstance(item, Problem), "solved": kept.solved(item.id)}
        for item in items
    }
    topics = [{"name": name, "ids": [item.id for item in listed]} for name, listed in whole.by_topic().items()]
    sources = [
        {"name": name, "ids": list(dict.fromkeys(item.id for _, items in rows for item in items))}
        for name, rows in whole.by_source().items()
    ]
    return {"items": entries, "topic": topics, "source": sources}


def _find(id: str) -> Item:
    try:
        return course().find(id[:100])
    except CourseError as error:
        raise NotFoundError(str(error)) from None


def describe(id: str) -> dict[str, Any]:
    """Return one item with its present numbers."""
    item, kept = _find(id), load()
    facts = {"id": item.id, "title": item.title, "claims": list(item.claims), "solved": kept.solved(item.id)}
    if not isinstance(item, Problem):
        given = [[{"text": hint}] for hint in item.hints]
        facts |= {"hints": given[: kept.record(item.id).hints], "hint_count": len(given)}
        return {**facts, "kind": "code", "problem": item.problem, "stub": item.stub}
    task = item.task(kept.record(item.id).draw)
    answer = task.drawn.answer
    text, _, _ = task.statement.partition("\n\n(a) ") if isinstance(answer, Choice) else (task.statement, "", "")
    choices: dict[str, Any] = {}
    if isinstance(answer, Choice):
        choices["options"] = [[letter, _pieces(answer.options[key])] for letter, key in answer.lettered().items()]
        choices["reasons"] = [[number, _pieces(answer.reasons[key])] for number, key in answer.numbered().items()]
    shown = kept.record(item.id).hints
    return {
        **facts,
        **choices,
        "kind": answer.kind,
        "statement": _pieces(text),
        "prompt": answer.prompt,
        "rows": list(item.rows),
        "hints": [_pieces(hint) for hint in task.hints[:shown]],
        "hint_count": len(task.hints),
    }


def _pieces(text: str) -> list[dict[str, Any]]:
    return pieces(text.replace("**", ""))


def act(id: str, request: schema.CourseAction, is_local: bool) -> dict[str, Any]:
    """Do what the page asks for one item: read, check, hint, new numbers, solution, grade."""
    item = _find(id)
    with SAVING:
        kept = load()
        if isinstance(item, Problem):
            task = item.task(kept.record(item.id).draw)
            match request.action:
                case "read":
                    return _read(task, request.answer)
                case "check":
                    return _check(task, request.answer, kept)
                case "hint":
                    return _hint(item.id, [_pieces(hint) for hint in task.hints], kept)
                case "new":
                    record = kept.record(item.id)
                    record.draw, record.hints = record.draw + 1, 0
                    kept.save()
                    return {"draw": record.draw}
                case "solution":
                    return _solution(task)
        elif request.action == "solution":
            return {"program": item.solution, "errata": []}
        elif request.action == "hint":
            return _hint(item.id, [[{"text": hint}] for hint in item.hints], kept)
        elif request.action == "grade" and not is_local:
            raise StudioError(
                "programs are graded only if the studio listens on this machine: use glass course answer."
            )
    if request.action == "grade" and not isinstance(item, Problem):
        return _grade(item, request.source)
    raise StudioError(f"{id} has no action {request.action}: choose another one.")


def _read(task: Task, text: str) -> dict[str, Any]:
    """Return how an answer is read, without judging it: the live feedback while a student types."""
    if not text.strip():
        return {"readable": False, "message": ""}
    answer = task.drawn.answer
    try:
        answer.read(text)
    except UnreadableError as error:
        return {"readable": False, "message": str(error)}
    shown = ""
    if isinstance(answer, Formula):
        import sympy

        tree = parse(notation.LEADING.sub("", text), tuple(answer.letters))
        shown = sympy.latex(to_sympy(tree), ln_notation=True)
    return {"readable": True, "message": "", "formula": _pieces(f"${shown}$") if shown else []}


def _check(task: Task, text: str, kept: Progress) -> dict[str, Any]:
    mark, record = task.check(text), kept.record(task.problem.id)
    record.attempts += mark.result != "unreadable"
    record.solved = record.solved or mark.right
    kept.save()
    return {"result": mark.result, "message": _pieces(mark.message), "solved": record.solved}


def _hint(id: str, given: list[Any], kept: Progress) -> dict[str, Any]:
    record = kept.record(id)
    record.hints = min(record.hints + 1, len(given))
    kept.save()
    return {"hints": given[: record.hints]}


def _solution(task: Task) -> dict[str, Any]:
    listed = [
        {"id": e.id, "states": _pieces(e.states), "fails": _pieces(e.fails), "example": e.example.strip()}
        for e in errata(task.problem)
    ]
    return {"solution": _pieces(task.solution), "answer": task.reference, "errata": listed}


def _grade(item: exercises.Exercise, source: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="glass-course-") as folder:
        file = Path(folder, f"{item.id}.py")
        file.write_text(source, encoding="utf-8")
        graded = exercises.grade(item, file)
    with SAVING:
        kept = load()
        record = kept.record(item.id)
        record.attempts += graded.exit_code < 2
        record.solved = record.solved or graded.exit_code == 0
        kept.save()
    return {"result": graded.result, "message": [{"text": graded.text()}], "solved": record.solved}
