"""Progress: kept in one file, resumed from it, and never lost."""

import pytest

from glassformer.theory.course.problem import CourseError
from glassformer.theory.course.progress import default_file, load


def test_progress_is_resumed(tmp_path):
    file = tmp_path / "new" / "course.json"
    progress = load(file)
    assert not progress.solved("self-weight")
    assert not file.exists()
    progress.record("self-weight").solved = True
    progress.record("self-weight").attempts = 3
    progress.record("untouched")
    progress.save()
    again = load(file)
    assert again.solved("self-weight")
    assert again.records.keys() == {"self-weight"}
    assert again.record("self-weight").attempts == 3
    assert [item.name for item in file.parent.iterdir()] == ["course.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9, "items": {}}', '{"version": 1, "items": {"a": {"x": 1}}}']
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, text):
    file = tmp_path / "course.json"
    file.write_text(text)
    with pytest.raises(CourseError, match="is not a progress file"):
        load(file)
    assert file.read_text() == text


def test_the_default_file_can_be_configured(monkeypatch, tmp_path):
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "mine.json"))
    assert default_file() == tmp_path / "mine.json"
    monkeypatch.delenv("GLASSFORMER_COURSE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_file().name == "course.json"
