"""A staged folder appears whole or not at all."""

import os

import pytest

from glassformer.weights import swap
from glassformer.weights.errors import WeightsError
from glassformer.weights.swap import staged


def write(path, text, keep=lambda name: False):
    with staged(path, keep) as stage:
        (stage / "file").write_text(text)


@pytest.mark.parametrize("exchange", [True, False])
def test_new_then_replaced(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(swap, "_exchange", lambda a, b: False)
    path = tmp_path / "deep" / "folder"
    write(path, "one")
    write(path, "two")
    assert (path / "file").read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["folder"]
    assert path.stat().st_mode & 0o777 == 0o777 & ~swap._umask()


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder"
    write(path, "one")

    def fail():
        with staged(path, lambda name: False) as stage:
            (stage / "file").write_text("two")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (path / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_files_to_keep_go_along_and_new_ones_win(tmp_path):
    path = tmp_path / "folder"
    write(path, "one")
    (path / "notes").write_text("mine")
    os.symlink("notes", path / "link")
    write(path, "two", keep=lambda name: True)
    assert (path / "file").read_text() == "two"
    assert (path / "notes").read_text() == "mine"
    assert os.readlink(path / "link") == "notes"


def test_a_failing_disk_is_one_sentence(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(swap, "_publish", fail)
    with pytest.raises(WeightsError, match="Input/output error"):
        write(tmp_path / "folder", "one")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    dead = next(pid for pid in range(4_000_000, 4_100_000) if not swap._alive(pid))
    mark = f".folder{swap._MARK}{swap.platform.node()}-"
    for pid in (dead, os.getpid()):
        (tmp_path / f"{mark}{pid}-x").mkdir()
    write(tmp_path / "folder", "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{mark}{os.getpid()}-x", "folder"]


def test_exchange_swaps_two_names_in_one_step(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not swap._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names; ends when the tests run on one that can")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot be written"):
        write(tmp_path / "file" / "folder", "one")
