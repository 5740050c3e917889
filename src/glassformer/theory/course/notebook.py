"""What a cell of an exported notebook calls: check an answer, grade a program, show a hint. Works offline."""

from pathlib import Path

from glassformer.theory import exercises
from glassformer.theory.course.problem import CourseError, Mark, Problem, Task
from glassformer.theory.course.registry import course
from glassformer.theory.course.sheets import plain


class Notebook:
    """The sheet of one student in a notebook. `problems` is a teacher's folder of problems."""

    def __init__(self, seed: int = 0, problems: str | Path | None = None) -> None:
        self.seed = seed
        self.course = course(Path(problems) if problems else None)

    def task(self, id: str) -> Task:
        item = self.course.find(id)
        if not isinstance(item, Problem):
            raise CourseError(f"{id} is a coding exercise: use grade({id!r}, FILE).")
        return item.task(self.seed)

    def answer(self, id: str, text: str) -> Mark | None:
        """Check an answer and print what is wrong with it. An empty answer is not checked."""
        if not str(text).strip():
            print(f"{id}: no answer yet. sheet.hint({id!r}, 1) shows a hint.")
            return None
        mark = self.task(id).check(str(text))
        print(f"{id}: {mark.result}. {mark.message}")
        return mark

    def hint(self, id: str, level: int = 1) -> None:
        """Print a hint; levels 1 to 3."""
        hints = self.task(id).hints
        if not 1 <= level <= len(hints):
            raise CourseError(f"there is no hint {level}: levels go from 1 to {len(hints)}.")
        print(plain(hints[level - 1]))

    def grade(self, id: str, file: str | Path) -> exercises.Grade:
        """Grade a program in a separate process with limits, and print the report."""
        grade = exercises.grade(exercises.find(id), file)
        print(grade.text())
        return grade
