"""What exercises share: their words, the source of a solution, and edits of it."""

from pathlib import Path

import numpy as np
import pytest

from glassformer.theory import exercises
from glassformer.theory.exercises import ALL
from glassformer.theory.exercises.exercise import Mistake, _words, excerpt, exercise, softmax

FOLDER = Path(exercises.__file__).parent


def test_softmax_subtracts_the_maximum():
    scores = np.array([[1000.0, 999.0], [-1000.0, -1001.0]])
    assert np.allclose(softmax(scores), [[0.731059, 0.268941]] * 2)
    assert np.allclose(softmax(scores, axis=0).sum(0), 1)


@pytest.mark.parametrize("id", ALL)
def test_a_solution_is_one_file_of_plain_python(id):
    text = ALL[id].solution
    assert "glassformer" not in text
    assert "exercise(" not in text
    names = {}
    exec(text, names)
    assert callable(names[ALL[id].function])
    assert all(f"def {name}(" in ALL[id].stub for name in ALL[id].given)
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


def test_words_of_every_exercise_are_used_and_planted_mistakes_are_in_the_file_to_start_from():
    written = {id for file in (FOLDER / "words").glob("*.toml") for id in _words(file.stem)}
    assert written == set(ALL)
    assert [exercise.id for exercise in ALL.values() if exercise.broken] == ["repair-generator"]
    assert all(mistake in ALL["repair-generator"].mistakes for mistake in ALL["repair-generator"].broken)


def test_words_that_an_exercise_does_not_have_are_refused(monkeypatch):
    words = {**_words("attention")["attention"], "tittle": "Attention"}
    monkeypatch.setattr("glassformer.theory.exercises.exercise._words", lambda module: {"attention": words})
    with pytest.raises(TypeError, match="tittle"):
        exercise("attention", solve=ALL["attention"].solve, cases=ALL["attention"].cases)


@pytest.mark.parametrize("id", ALL)
def test_there_are_three_different_hints(id):
    found = ALL[id].hints
    assert len(found) == len(set(found)) == 3
    assert all(20 < len(hint) <= 160 and hint.endswith(".") for hint in found)


@pytest.mark.parametrize("id", ALL)
def test_only_the_last_hint_may_contain_lines_of_the_solution(id):
    lines = [line.strip() for line in ALL[id].solution.splitlines() if len(line.strip()) > 30 and '"""' not in line]
    assert not any(line in hint for hint in ALL[id].hints[:2] for line in lines)
