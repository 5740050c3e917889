"""Write a sheet for a class: a notebook, a Markdown file or a page to print, with the same numbers for all or not."""

import csv
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from glassformer.files import write_atomically
from glassformer.pages.page import render
from glassformer.theory.claims.formulas import readable
from glassformer.theory.claims.page import formulas
from glassformer.theory.course.problem import CourseError, Problem, Task
from glassformer.theory.course.registry import Course, Item, built_in
from glassformer.theory.exercises import Exercise

Format = Literal["notebook", "pdf-ready-html", "markdown"]
SUFFIXES = {"notebook": ".ipynb", "pdf-ready-html": ".html", "markdown": ".md"}


@dataclass(frozen=True)
class Student:
    """A name and the seed of the numbers."""

    name: str
    seed: int


def seed_of(name: str) -> int:
    """Return the seed of a student whose seed is not in the roster: it depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def read_roster(file: Path) -> list[Student]:
    """Read a CSV file with the column `student` and optionally `seed`."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as held:
            rows = list(csv.DictReader(held))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{file} cannot be read as a roster ({error}): give a CSV file.") from None
    if not rows or "student" not in rows[0]:
        raise CourseError(f"{file} has no column `student`, or no rows: the first line must name the columns.")
    students = []
    for row in rows:
        name, seed = (row["student"] or "").strip(), (row.get("seed") or "").strip()
        if not name or name != Path(name).name or name.startswith("."):
            raise CourseError(f"{file}: {name!r} cannot be the name of a student, because files are named after it.")
        if seed and not seed.isdigit():
            raise CourseError(f"{file}: the seed {seed!r} of {name} must be a whole number.")
        students.append(Student(name, int(seed) if seed else seed_of(name)))
    if len({student.name for student in students}) < len(students):
        raise CourseError(f"{file} names a student twice: names must be different.")
    return students


@dataclass(frozen=True)
class Sheet:
    """A sheet for one student, or for all."""

    title: str
    items: Sequence[Item]
    student: Student
    solutions: bool = False

    def task(self, problem: Problem) -> Task:
        return problem.task(self.student.seed)

    def write(self, format: Format) -> str:
        match format:
            case "notebook":
                return json.dumps(self.notebook(), indent=1)
            case "markdown":
                return self.markdown()
            case "pdf-ready-html":
                return self.page()

    def markdown(self) -> str:
        lines = [f"# {self.title}", ""]
        lines += [f"Student: {self.student.name}", ""] if self.student.name else []
        for number, item in enumerate(self.items, 1):
            lines += [f"## {number}. {item.title} (`{item.id}`)", "", self._body(item), ""]
        return "\n".join([*lines, "---", "", *self._how_to_answer(), ""])

    def _body(self, item: Item) -> str:
        if isinstance(item, Exercise):
            return f"{_markdown(item.problem)}\n\n```python\n{item.solution if self.solutions else item.stub}```"
        task = self.task(item)
        text = f"{task.statement}\n\nAnswer: {task.drawn.answer.prompt}."
        return f"{text}\n\n**Solution.** {task.solution}\n\n**Answer.** {task.reference}" if self.solutions else text

    def _how_to_answer(self) -> list[str]:
        answers = [f'{item.id} = ""' for item in self.items if isinstance(item, Problem)]
        return [
            "Write your answers into a file `answers.toml`, and each program into a file named after it, such as "
            "`attention.py`, in the same folder:",
            "",
            "```toml",
            f"student = {json.dumps(self.student.name)}",
            f"seed = {self.student.seed}",
            "",
            "[answers]",
            *answers,
            "```",
        ]

    def page(self) -> str:
        """Return a self-contained HTML page that a browser prints to PDF."""
        shown = []
        for item in self.items:
            task = self.task(item) if isinstance(item, Problem) else None
            statement = item.problem if isinstance(item, Exercise) else self.task(item).statement
            shown.append(
                {
                    "id": item.id,
                    "title": item.title,
                    "paragraphs": [(text.startswith(" "), _formulas(text)) for text in statement.split("\n\n")],
                    "prompt": task.drawn.answer.prompt if task else "",
                    "stub": (item.solution if self.solutions else item.stub) if isinstance(item, Exercise) else "",
                    "solution": _formulas(task.solution) if task and self.solutions else "",
                    "reference": task.reference if task and self.solutions else "",
                }
            )
        return render("sheet.html", title=self.title, student=self.student, items=shown)

    def notebook(self) -> dict[str, Any]:
        """Return a Jupyter notebook whose cells check the answers with this package, offline."""
        # a teacher's own problems are handed out in a folder next to the notebook
        own = "problems" if any(isinstance(i, Problem) and i.id not in built_in() for i in self.items) else None
        facts = {"sheet": self.title, "student": self.student.name, "seed": self.student.seed}
        student = f"Student: {self.student.name}. " if self.student.name else ""
        cells = [
            _cell("markdown", f"# {self.title}\n\n{student}Run the cells in their order."),
            _cell(
                "code",
                "from glassformer.theory.course.notebook import Notebook\n\n"
                f"sheet = Notebook(seed={self.student.seed}, problems={own!r})",
            ),
        ]
        for number, item in enumerate(self.items, 1):
            title = f"## {number}. {item.title}\n\n"
            if isinstance(item, Exercise):
                program = item.solution if self.solutions else item.stub
                cells.append(_cell("markdown", title + _markdown(item.problem)))
                cells.append(_cell("code", f"%%writefile {item.id}.py\n{program}", item.id))
                cells.append(_cell("code", f'sheet.grade("{item.id}", "{item.id}.py")'))
                continue
            task = self.task(item)
            cells.append(_cell("markdown", f"{title}{task.statement}\n\nAnswer: {task.drawn.answer.prompt}."))
            answer = task.reference if self.solutions else ""
            cells.append(_cell("code", f"sheet.answer({item.id!r}, {answer!r})", item.id))
            if self.solutions:
                cells.append(_cell("markdown", f"**Solution.** {task.solution}"))
        language = {"name": "python", "pygments_lexer": "ipython3"}
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        metadata = {"kernelspec": kernel, "language_info": language, "glassformer": facts}
        return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}


EMPHASIS = re.compile(r"(?<!\w)\*\*(\w[^*<]*)\*\*(?!\w)")
CODE = re.compile(r"`([^`<>]+)`")


def _formulas(text: str) -> Markup:
    if text.startswith(" "):  # a table of a coding exercise keeps its lines
        return Markup("{}").format(text)
    return Markup(CODE.sub(r"<code>\1</code>", EMPHASIS.sub(r"<strong>\1</strong>", str(formulas(text)))))


def _markdown(problem: str) -> str:
    """Return the words of a coding exercise as Markdown, in which a table of arguments keeps its lines."""
    parts = [f"```text\n{part}\n```" if part.startswith(" ") else part for part in problem.split("\n\n")]
    return "\n\n".join(parts)


def title_of(name: str) -> str:
    """Return the title of a sheet: the topic or source, or a word for a list of ids."""
    return "Exercises" if "," in name else name[:1].upper() + name[1:]


def _cell(kind: str, source: str, item: str = "") -> dict[str, Any]:
    id = hashlib.sha256(f"{kind}/{item}/{source}".encode()).hexdigest()[:12]
    metadata = {"glassformer": {"id": item}} if item else {}
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": id,
        "metadata": metadata,
        "source": source.splitlines(keepends=True),
    }
    return cell | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def plain(text: str) -> str:
    """Return a statement for a terminal: formulas in Unicode, no Markdown."""
    return readable(text.replace("**", ""))


def export(
    course: Course, name: str, format: Format, out: Path, roster: Sequence[Student] = (), solutions: bool = False
) -> list[Path]:
    """Write a sheet to the file `out`, or one sheet per student into the folder `out`. Return the files."""
    items = course.sheet(name)
    if not items:
        raise CourseError(f"the sheet {name!r} is empty: choose another one.")
    if not roster:
        write_atomically(out, Sheet(title_of(name), items, Student("", 0), solutions).write(format).encode())
        return [out]
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for student in roster:
        file = out / f"{student.name}{SUFFIXES[format]}"
        write_atomically(file, Sheet(title_of(name), items, student, solutions).write(format).encode())
        files.append(file)
    return files
