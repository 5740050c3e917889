"""What exercises share: the source of a solution, and edits of it."""

import numpy as np
import pytest

from glassformer.theory.exercises import ALL
from glassformer.theory.exercises.exercise import Mistake, excerpt, softmax


def test_softmax_subtracts_the_maximum():
    scores = np.array([[1000.0, 999.0], [-1000.0, -1001.0]])
    assert np.allclose(softmax(scores), [[0.731059, 0.268941]] * 2)
    assert np.allclose(softmax(scores, axis=0).sum(0), 1)


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_a_solution_is_one_file_of_plain_python(exercise):
    text = exercise.solution
    assert "glassformer" not in text
    assert "Exercise(" not in text
    names = {}
    exec(text, names)
    assert callable(names[exercise.function])
    assert all(f"def {name}(" in exercise.stub for name in exercise.given)
    assert ") ->" not in text


def test_an_excerpt_has_the_helpers_and_imports_that_are_used_and_no_others():
    text = excerpt(ALL["pre-norm-block"].solve, ["attend"])
    assert text.startswith("import numpy as np\n\n\ndef softmax(scores, axis=-1):\n")
    assert text.count("def ") == 2
    assert ALL["block-parameters"].solution.startswith("def block_parameters(d, f):\n")


def test_mistakes_that_exclude_each_other_have_no_variant():
    exercise = ALL["attention"]
    assert exercise.variant([Mistake("", {"no such text": ""})]) is None
    assert exercise.variant(exercise.mistakes[:2]) is None  # both edit the scale
    assert exercise.variant(exercise.mistakes[:1]) is not None
