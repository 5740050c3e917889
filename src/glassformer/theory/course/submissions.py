"""Grade the submissions of a class: notebooks, or folders with answers.toml and programs.

Answers are read, never run. Programs run in the processes of `exercises.Grader`, with their limits.
"""

import ast
import csv
import datetime
import io
import json
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.files import write_atomically
from glassformer.theory import exercises
from glassformer.theory.course.problem import UNREADABLE, CourseError, Problem
from glassformer.theory.course.registry import Course, Item
from glassformer.theory.course.sheets import Student
from glassformer.theory.exercises.grading import RIGHT, UNGRADED

WORKERS = 2
LARGEST = 5_000_000
"""Bytes of a submitted file that is read."""


@dataclass(frozen=True)
class Submission:
    """What a student handed in. `problem` says why it could not be read, or is empty."""

    student: str
    seed: int
    answers: Mapping[str, str]
    programs: Mapping[str, str]
    """The source of each program by the id of its exercise."""
    changed: float
    """When it was last changed, in seconds since 1970."""
    problem: str = ""


@dataclass(frozen=True)
class Result:
    """One item of one submission."""

    item: Item
    points: int
    state: str
    """right, wrong, unreadable, ungraded or missing."""
    message: str


@dataclass(frozen=True)
class Report:
    """All results of a student."""

    submission: Submission
    results: Sequence[Result]
    late: bool = False

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)

    def markdown(self) -> str:
        lines = [f"# {self.submission.student}: {self.points} of {len(self.results)}", ""]
        lines += ["This submission is late.", ""] if self.late else []
        lines += [f"It could not be read: {self.submission.problem}", ""] if self.submission.problem else []
        for result in self.results:
            lines += [f"## {result.item.title} (`{result.item.id}`): {result.state}", "", result.message, ""]
        return "\n".join(lines)

    def gradescope(self) -> dict[str, Any]:
        """Return the results in the JSON format of a Gradescope autograder."""
        tests = [
            {
                "name": result.item.title,
                "number": str(number),
                "score": result.points,
                "max_score": 1,
                "status": "passed" if result.points else "failed",
                "output": result.message,
            }
            for number, result in enumerate(self.results, 1)
        ]
        return {"score": self.points, "output": "late" if self.late else "", "tests": tests}


def read_folder(folder: Path) -> list[Submission]:
    """Read every submission of a folder: NAME.ipynb files, and folders NAME with answers.toml and programs."""
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder: give a folder with one notebook or folder for each student.")
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.suffix == ".ipynb" or path.is_dir():
            found.append(_read(path))
    if not found:
        raise CourseError(f"{folder} contains no submission: it needs NAME.ipynb files, or folders with answers.toml.")
    return found


def _read(path: Path) -> Submission:
    name, changed = path.stem if path.suffix == ".ipynb" else path.name, path.stat().st_mtime
    try:
        if path.is_dir():
            return _read_answers(path, name)
        return _read_notebook(json.loads(_text(path)), name, changed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Submission(name, 0, {}, {}, changed, f"{type(error).__name__}: {error}")


def _text(path: Path) -> str:
    if path.is_symlink() or path.stat().st_size > LARGEST:
        raise ValueError(f"{path.name} is a link or has more than {LARGEST:,} bytes")
    return path.read_text(encoding="utf-8")


def _read_answers(folder: Path, name: str) -> Submission:
    listed = folder / "answers.toml"
    data = tomllib.loads(_text(listed)) if listed.exists() else {}
    answers = {str(id): str(text) for id, text in data.get("answers", {}).items()}
    files = [file for file in sorted(folder.glob("*.py")) if file.stem in exercises.ALL]
    times = [file.stat().st_mtime for file in (listed, *files) if file.exists()]
    programs = {file.stem: _text(file) for file in files}
    return Submission(name, int(data.get("seed", 0)), answers, programs, max(times, default=folder.stat().st_mtime))


def _read_notebook(data: Mapping[str, Any], name: str, changed: float) -> Submission:
    answers: dict[str, str] = {}
    programs: dict[str, str] = {}
    for cell in data["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell.get("cell_type") != "code":
            continue
        first, _, rest = source.partition("\n")
        written = first.removeprefix("%%writefile ").strip() if first.startswith("%%writefile ") else ""
        if written.removesuffix(".py") in exercises.ALL:
            programs[written.removesuffix(".py")] = rest
        elif "sheet.answer(" in source:
            answers |= _literal_answers(source)
    facts = data.get("metadata", {}).get("glassformer", {})
    return Submission(name, int(facts.get("seed", 0)), answers, programs, changed)


def _literal_answers(source: str) -> dict[str, str]:
    """Return the answers of a cell: calls `sheet.answer("id", "text")` with literal arguments. Nothing is run."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "sheet.answer" and len(node.args) == 2:
            try:
                id, text = (ast.literal_eval(argument) for argument in node.args)
            except ValueError:
                continue
            if str(text).strip():
                found[str(id)] = str(text)
    return found


def grade_all(
    course: Course,
    submissions: Sequence[Submission],
    sheet: str | None = None,
    roster: Sequence[Student] = (),
    due: datetime.datetime | None = None,
) -> list[Report]:
    """Grade all submissions, several at a time. Without a sheet, every item that any student answered counts."""
    named = dict.fromkeys(id for one in submissions for id in (*one.answers, *one.programs))
    known = [id for id in named if id in course.problems or id in course.exercises]
    items = course.sheet(sheet) if sheet else [course.find(id) for id in known]
    if not items:
        raise CourseError("no submission answers a problem of this course: check the files, or name the sheet.")
    seeds = {student.name: student.seed for student in roster}
    absent = [Submission(name, seeds[name], {}, {}, 0.0, "") for name in seeds]
    everyone = [*submissions, *(one for one in absent if one.student not in {s.student for s in submissions})]

    with exercises.Grader(WORKERS) as grader, ThreadPoolExecutor(WORKERS) as pool:

        def grade(one: Submission) -> Report:
            results = [_grade(one, item, seeds.get(one.student, one.seed), grader) for item in items]
            return Report(one, results, due is not None and one.changed > due.timestamp())

        return list(pool.map(grade, everyone))  # each program runs in a process of its own


def _grade(one: Submission, item: Item, seed: int, grader: exercises.Grader) -> Result:
    if isinstance(item, Problem):
        text = one.answers.get(item.id, "").strip()
        if not text:
            return Result(item, 0, "missing", "No answer.")
        mark = item.task(seed).check(text)
        return Result(item, int(mark.right), mark.result, f"Answer: {text[:200]}. {mark.message}")
    source = one.programs.get(item.id, "")
    if not source.strip() or source.strip() == item.stub.strip():
        return Result(item, 0, "missing", "No program.")
    with tempfile.TemporaryDirectory(prefix="glass-grade-") as folder:
        file = Path(folder, f"{item.id}.py")
        file.write_text(source, encoding="utf-8")
        graded = grader.grade(item, file)
    state = graded.result if graded.result != UNGRADED else UNREADABLE
    return Result(item, int(graded.result == RIGHT), state, graded.text())


def write_csv(reports: Sequence[Report], file: Path) -> None:
    """Write one line per student: points, total, late, and the state of each item."""
    out = io.StringIO()
    writer = csv.writer(out)
    ids = [result.item.id for result in reports[0].results] if reports else []
    writer.writerow(["student", "points", "total", "late", "note", *ids])
    for report in reports:
        states = [result.state for result in report.results]
        late = "yes" if report.late else "no"
        writer.writerow(
            [
                _cell(report.submission.student),
                report.points,
                len(states),
                late,
                _cell(report.submission.problem),
                *states,
            ]
        )
    write_atomically(file, out.getvalue().encode())


def _cell(text: str) -> str:
    """Return text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def write_reports(reports: Sequence[Report], folder: Path) -> None:
    """Write NAME.md and NAME.json (Gradescope) for every student."""
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        name = report.submission.student
        write_atomically(folder / f"{name}.md", report.markdown().encode())
        write_atomically(folder / f"{name}.json", json.dumps(report.gradescope(), indent=1).encode())
