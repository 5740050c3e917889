"""Measure the time of grading: `python -m glassformer.theory.exercises.benchmark [SUBMISSIONS] [WORKERS]`.

Every submission answers five exercises: most with the reference solution, some with a recorded mistake, and one file
in fifty with an endless loop, which takes the whole limit of time. Run it on a machine that does nothing else.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from glassformer.theory.exercises.exercise import Exercise
from glassformer.theory.exercises.grading import RIGHT, WRONG, Grader
from glassformer.theory.exercises.registry import find

IDS = ("attention", "multi-head", "layer-norm", "top-p", "gpt")
LOOP = "\n\ndef {function}(*arguments):\n    while True:\n        pass\n"


def submissions(folder: Path, count: int, seed: int = 0) -> list[tuple[Exercise, Path, str]]:
    """Write the files of `count` students. Return each with its exercise and the expected result."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count * len(IDS)):
        exercise = find(IDS[number % len(IDS)])
        text, expected = exercise.solution, RIGHT
        if number % 50 == 49:
            text, expected = text + LOOP.format(function=exercise.function), WRONG
        elif rng.random() < 0.4:
            mistake = exercise.mistakes[rng.integers(len(exercise.mistakes))]
            for old, new in mistake.edits.items():
                text = text.replace(old, new)
            expected = WRONG
        file = folder / f"{number}.py"
        file.write_text(text, encoding="utf-8")
        found.append((exercise, file, expected))
    return found


def measure(count: int, workers: int) -> dict[str, float]:
    """Grade the files of `count` students. Return the seconds, and how many grades were as expected."""
    with tempfile.TemporaryDirectory(prefix="glass-benchmark-") as folder:
        made = submissions(Path(folder), count)
        start = time.monotonic()
        with Grader(workers) as grader:
            grades = list(grader.grade_all([(exercise, file) for exercise, file, _ in made]))
        seconds = time.monotonic() - start
    agree = sum(grade.result == expected for grade, (_, _, expected) in zip(grades, made, strict=True))
    results = Counter(grade.result for grade in grades)
    return {"files": len(made), "seconds": seconds, "as expected": agree, **results}


def main() -> None:
    count, workers = (int(word) for word in (*sys.argv[1:], *("100", "2")[len(sys.argv) - 1 :]))
    for name, value in measure(count, workers).items():
        print(f"{name:<12}{value:>10.1f}" if name == "seconds" else f"{name:<12}{value:>10}")


if __name__ == "__main__":
    main()
