"""The course: problems with drawn numbers, coding exercises, progress, sheets for a class.

`course()` returns all problems and exercises; `course().find(id).task(seed)` is a problem with numbers, whose `check`
marks an answer. A teacher's Python file imports `Drawn` and the kinds of answers from here.
"""

from glassformer.theory.course.answers import Choice, Formula, Matrix, Number, TrueFalse
from glassformer.theory.course.problem import CourseError, Draw, Drawn, Mark, Problem, Task
from glassformer.theory.course.registry import Course, course

__all__ = [
    "Choice",
    "Course",
    "CourseError",
    "Draw",
    "Drawn",
    "Formula",
    "Mark",
    "Matrix",
    "Number",
    "Problem",
    "Task",
    "TrueFalse",
    "course",
]
