"""`glass course`: practise the exercises of the five sources, keep track of them, and run them with a class."""

import datetime
import json as json_module
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glassformer.cli.common import Force, InputError, Json, check_writable, fitted, option

if TYPE_CHECKING:
    from glassformer.theory.course import Course
    from glassformer.theory.course.problem import Task
    from glassformer.theory.course.progress import Progress
    from glassformer.theory.course.registry import Item

Action = Literal["list", "next", "status", "show", "hint", "answer", "solution", "export", "grade"]
HELP = {
    "action": "What to do: list, next, status, show ID, hint ID, answer ID TEXT, solution ID, export SHEET or grade "
    "FOLDER. Default: list.",
    "name": "Id of a problem or exercise; for `list` and `export` a sheet: a topic, a source, `own`, or ids separated "
    "by commas; for `grade` a folder of submissions. Default: none.",
    "answer": "The answer, such as 0.25, 1/4, sqrt(n), '1 2; 3 4', 'false: 2, -1' or 'b 2'. Default: it is asked for.",
    "by": "Order of `list`: by topic or by source.",
    "file": "The Python file that solves a coding exercise. Default: none.",
    "new": "Draw new numbers for the problem.",
    "progress": "File that keeps the progress. Default: course.json in the user's data folder.",
    "problems": "Folder with a teacher's own problems; its Python files are run. Default: none.",
    "format": "Format of an exported sheet.",
    "out": "File of an exported sheet, or its folder with --seed-per-student. Default: SHEET in the current folder.",
    "seed_per_student": "CSV file with a column `student` (and optionally `seed`): each student gets other numbers. "
    "Default: the same numbers for all.",
    "solutions": "Include the solutions in an exported sheet.",
    "csv": "Write one line per student to this CSV file. Default: print only.",
    "reports": "Write a report and a Gradescope result file for each student into this folder. Default: none.",
    "sheet": "The sheet that is graded. Default: everything that a submission answers.",
    "due": "Submissions changed after this time are marked late, such as 2026-11-30T12:00. Default: none is late.",
}


def course(
    action: Annotated[tyro.conf.Positional[Action], option(HELP["action"], "ACTION")] = "list",
    name: Annotated[tyro.conf.Positional[str | None], option(HELP["name"], "NAME")] = None,
    answer: Annotated[tyro.conf.Positional[tuple[str, ...]], option(HELP["answer"], "ANSWER")] = (),
    by: Annotated[Literal["topic", "source"], option(HELP["by"])] = "topic",
    file: Annotated[Path | None, option(HELP["file"], "FILE")] = None,
    new: Annotated[bool, option(HELP["new"])] = False,
    progress: Annotated[Path | None, option(HELP["progress"], "FILE")] = None,
    problems: Annotated[Path | None, option(HELP["problems"], "DIR")] = None,
    format: Annotated[Literal["notebook", "pdf-ready-html", "markdown"], option(HELP["format"])] = "notebook",
    out: Annotated[Path | None, option(HELP["out"], "PATH")] = None,
    seed_per_student: Annotated[Path | None, option(HELP["seed_per_student"], "FILE")] = None,
    solutions: Annotated[bool, option(HELP["solutions"])] = False,
    csv: Annotated[Path | None, option(HELP["csv"], "FILE")] = None,
    reports: Annotated[Path | None, option(HELP["reports"], "DIR")] = None,
    sheet: Annotated[str | None, option(HELP["sheet"], "SHEET")] = None,
    due: Annotated[str | None, option(HELP["due"], "TIME")] = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Practise the exercises of the sources. Exit code 0: done or correct, 1: incorrect, 2: could not be graded."""
    from glassformer.theory.course import course as load_course
    from glassformer.theory.course.progress import load

    whole = load_course(problems)
    if action == "export":
        return _export(whole, _named(name, "a sheet"), format, out, seed_per_student, solutions, force, json)
    if action == "grade":
        folder = Path(_named(name, "a folder of submissions"))
        return _grade(whole, folder, csv, reports, sheet, seed_per_student, due, force, json)
    kept = load(progress)
    if action == "list":
        return _list(whole, kept, name, by, json)
    if action == "status":
        return _status(whole, kept, json)
    item = _next(whole, kept) if action == "next" and name is None else whole.find(_named(name, "a problem"))
    record = kept.record(item.id)
    if new:
        record.draw, record.hints = record.draw + 1, 0
        _save(kept)
    if action in ("show", "next"):
        return _show(item, kept, json)
    if action == "answer":
        return _answer(item, kept, " ".join(answer), file, json)
    return _help(item, kept, action, json)


def _save(kept: "Progress") -> None:
    """Keep the progress; an answer is judged even where nothing can be written."""
    try:
        kept.save()
    except OSError as error:
        reason = f"{kept.file} cannot be written ({error.strerror})"
        note = f"note: the progress is not kept, because {reason}: name another file with --progress."
        print(fitted(note, sys.stderr), file=sys.stderr)


def _named(name: str | None, what: str) -> str:
    if name is None:
        raise InputError(f"name {what}: `glass course list` shows what there is.")
    return name


def _print(facts: dict[str, Any], text: str, json: bool) -> None:
    print(json_module.dumps(facts) if json else fitted(text))


def _next(whole: "Course", kept: "Progress") -> "Item":
    for items in whole.by_topic().values():
        for item in items:
            if not kept.solved(item.id):
                return item
    raise InputError("everything is solved: `glass course show ID --new` draws new numbers.")


def _list(whole: "Course", kept: "Progress", name: str | None, by: str, json: bool) -> int:
    if name is not None:
        groups = {name: [("", whole.sheet(name))]}
    elif by == "topic":
        groups = {topic: [("", items)] for topic, items in whole.by_topic().items()}
    else:
        groups = whole.by_source()
    if json:
        rows = [
            {"group": group, "source": cite, "id": item.id, "title": item.title, "solved": kept.solved(item.id)}
            for group, parts in groups.items()
            for cite, items in parts
            for item in items
        ]
        print(json_module.dumps({"items": rows}))
        return 0
    for group, parts in groups.items():
        print(f"\n{group}")
        for cite, items in parts:
            if cite:
                print(f" {cite}")
            for item in items:
                print(f"  [{'x' if kept.solved(item.id) else ' '}] {item.id:<24}{item.title}")
    print("\nglass course next shows the first one that is not solved.")
    return 0


def _status(whole: "Course", kept: "Progress", json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for topic, items in whole.by_topic().items():
        solved = sum(kept.solved(item.id) for item in items)
        rows.append({"topic": topic, "solved": solved, "total": len(items)})
    if json:
        print(json_module.dumps({"progress": str(kept.file), "topics": rows}))
        return 0
    for row in rows:
        done = round(20 * row["solved"] / max(row["total"], 1))
        print(f"{row['topic']:<12}{'#' * done}{'.' * (20 - done)} {row['solved']:>3} of {row['total']}")
    print(f"progress: {kept.file}")
    return 0


def _task(item: "Item", kept: "Progress") -> "Task | None":
    from glassformer.theory.course import Problem

    return item.task(kept.record(item.id).draw) if isinstance(item, Problem) else None


def _show(item: "Item", kept: "Progress", json: bool) -> int:
    from glassformer.theory.course.sheets import plain
    from glassformer.theory.exercises import Exercise

    facts: dict[str, Any] = {"id": item.id, "title": item.title, "claims": list(item.claims)}
    if isinstance(item, Exercise):
        facts |= {"kind": "code", "statement": item.problem, "stub": item.stub}
        text = (
            f"{item.title}\n\n{facts['statement']}\n\n{facts['stub']}\nglass exercise {item.id} --stub FILE starts a "
        )
        text += f"file; glass course answer {item.id} --file FILE grades it."
    else:
        task = item.task(kept.record(item.id).draw)
        prompt, sources = task.drawn.answer.prompt, list(task.problem.rows)
        facts |= {"kind": task.drawn.answer.kind, "statement": task.statement, "answer": prompt, "sources": sources}
        text = f"{item.title}\n\n{plain(task.statement)}\n\nAnswer: {prompt}. From: {', '.join(sources) or 'own'}.\n"
        text += f"glass course answer {item.id} ANSWER"
    facts |= {"solved": kept.solved(item.id)}
    _print(facts, text, json)
    return 0


def _answer(item: "Item", kept: "Progress", text: str, file: Path | None, json: bool) -> int:
    from glassformer.theory import exercises

    task, record = _task(item, kept), kept.record(item.id)
    if task is None:
        if file is None:
            raise InputError(f"{item.id} is a coding exercise: give your program with --file FILE.")
        grade = exercises.grade(exercises.find(item.id), file)
        result, report, code = grade.result, grade.text(), grade.exit_code
    else:
        if not text:
            if json or not sys.stdin.isatty():
                raise InputError("the answer is missing: write it after the id, in quotes if it contains blanks.")
            text = input(f"{item.title}: ")
        mark = task.check(text)
        result, report = mark.result, mark.message
        code = {"right": 0, "wrong": 1}.get(result, 2)
    record.attempts += code < 2
    record.solved = record.solved or code == 0
    _save(kept)
    hint = "" if code == 0 else f"\nglass course hint {item.id} shows a hint."
    facts = {"id": item.id, "result": result, "message": report, "solved": record.solved}
    _print(facts, f"{result}: {report}{hint}" if task else f"{report}{hint}", json)
    return code


def _help(item: "Item", kept: "Progress", action: str, json: bool) -> int:
    from glassformer.theory.course.registry import errata
    from glassformer.theory.course.sheets import plain
    from glassformer.theory.exercises import Exercise

    task, record = _task(item, kept), kept.record(item.id)
    claims = f"glass check {' '.join(item.claims)} --explain" if item.claims else ""
    if action == "hint":
        hints = (task or item).hints
        record.hints = min(record.hints + 1, len(hints))
        _save(kept)
        hint = hints[record.hints - 1]
        text = f"hint {record.hints} of {len(hints)}: {plain(hint) if task else hint}"
        _print({"id": item.id, "level": record.hints, "hint": hint}, text, json)
        return 0
    if isinstance(item, Exercise):
        facts: dict[str, Any] = {"id": item.id, "solution": item.solution, "claims": list(item.claims)}
        _print(facts, f"{item.solution}\n{claims}", json)
        return 0
    assert task is not None
    named = ("id", "states", "fails", "correct", "example")
    listed = [{name: getattr(erratum, name).strip() for name in named} for erratum in errata(item)]
    text = f"{plain(task.solution)}\n\nanswer: {task.reference}"
    for one in listed:
        text += f"\n\n{one['id']}, an error in a source. It states: {plain(one['states'])}\nWhy it fails: "
        text += f"{plain(one['fails'])}\nThe smallest counterexample as Python; `holds` is False at the end:\n"
        text += textwrap.indent(one["example"], "    ")
    if item.claims:
        text += f"\n\nderivation: {claims}\nfigure: glass check {item.claims[0]} --figure FILE"
    facts = {"id": item.id, "solution": task.solution, "answer": task.reference, "claims": list(item.claims)}
    _print({**facts, "errata": listed}, text, json)
    return 0


def _export(
    whole: "Course",
    name: str,
    format: Any,
    out: Path | None,
    roster: Path | None,
    solutions: bool,
    force: bool,
    json: bool,
) -> int:
    from glassformer.theory.course import sheets

    students = sheets.read_roster(roster) if roster else []
    stem = name.replace(" ", "-").replace(".", "").replace(",", "-")
    target = out or Path(stem if students else f"{stem}{sheets.SUFFIXES[format]}")
    if students:
        targets = [target / f"{student.name}{sheets.SUFFIXES[format]}" for student in students]
    else:
        targets = [target]
    for one in targets:
        check_writable("--out", one, makes_folders=bool(students), force=force)
    files = sheets.export(whole, name, format, target, students, solutions)
    _print({"written": [str(file) for file in files]}, "\n".join(map(str, files)), json)
    return 0


def _grade(
    whole: "Course",
    folder: Path,
    csv: Path | None,
    reports: Path | None,
    sheet: str | None,
    roster: Path | None,
    due: str | None,
    force: bool,
    json: bool,
) -> int:
    from glassformer.theory.course import sheets, submissions

    if csv is not None:
        check_writable("--csv", csv, suffixes=(".csv",), force=force)
    if reports is not None and reports.exists() and not force:
        raise InputError(f"--reports {reports} already exists: pass --force to replace its reports.")
    try:
        limit = datetime.datetime.fromisoformat(due) if due else None
    except ValueError:
        raise InputError(f"--due {due} must be a time such as 2026-11-30T12:00.") from None
    students = sheets.read_roster(roster) if roster else []
    graded = submissions.grade_all(whole, submissions.read_folder(folder), sheet, students, limit)
    if csv is not None:
        submissions.write_csv(graded, csv)
    if reports is not None:
        submissions.write_reports(graded, reports)
    rows = [
        {"student": r.submission.student, "points": r.points, "total": len(r.results), "late": r.late,
         "note": r.submission.problem, "items": {x.item.id: x.state for x in r.results}}
        for r in graded
    ]  # fmt: skip
    lines = [f"{row['student']:<24}{row['points']} of {row['total']}{'  late' if row['late'] else ''}" for row in rows]
    _print({"students": rows}, "\n".join(lines), json)
    return 0
