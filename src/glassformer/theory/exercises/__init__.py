"""Exercises: a problem, a stub, and a grader that reports what is wrong.

`find(id)` returns an exercise; `grade(exercise, file)` runs a student's file on hidden cases in a limited process.
A `Grader` grades many files.
"""

from glassformer.theory.exercises.exercise import Exercise, ExerciseError
from glassformer.theory.exercises.grading import Grade, Grader, grade
from glassformer.theory.exercises.registry import ALL, find

__all__ = ["ALL", "Exercise", "ExerciseError", "Grade", "Grader", "find", "grade"]
