"""The measurement of grading: its files are what they should be, and their grades are as expected."""

from glassformer.theory.exercises import benchmark as module
from glassformer.theory.exercises.grading import RIGHT, WRONG


def test_the_files_are_right_and_wrong(tmp_path):
    made = module.submissions(tmp_path, 20)
    assert len(made) == 100
    assert {expected for _, _, expected in made} == {RIGHT, WRONG}
    assert sum("while True" in file.read_text() for _, file, _ in made) == 2
    for exercise, file, expected in made:
        text = file.read_text()
        assert (text == exercise.solution) == (expected == RIGHT)


def test_a_small_run_grades_every_file():
    found = module.measure(3, 2)
    assert found["files"] == found["as expected"] == 15
    assert found["seconds"] > 0
