"""A staged folder appears completely or not at all."""

import os

import pytest

from glassformer.weights import swap
from glassformer.weights.errors import WeightsError
from glassformer.weights.swap import staged


def write(path, text, overwrite=True):
    with staged(path, overwrite) as stage:
        (stage / "file").write_text(text)


@pytest.fixture
def dead():
    """The id of no process."""
    return next(pid for pid in range(4_000_000, 4_100_000) if not swap._alive(pid))


@pytest.mark.parametrize("exchange", [True, False])
def test_new_then_replaced(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(swap, "_exchange", lambda a, b: False)
    path = tmp_path / "deep" / "folder"
    write(path, "one")
    (path / "notes").write_text("of the old one")
    write(path, "two")
    assert [p.name for p in path.iterdir()] == ["file"]
    assert (path / "file").read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["folder"]
    assert path.stat().st_mode & 0o777 == 0o777 & ~swap._umask()


def test_without_overwrite_only_an_empty_folder_is_replaced(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    write(path, "one", overwrite=False)
    with pytest.raises(WeightsError, match="not empty"):
        write(path, "two", overwrite=False)
    assert (path / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder"
    write(path, "one")

    def fail():
        with staged(path, overwrite=True) as stage:
            (stage / "file").write_text("two")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (path / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_where_names_cannot_be_exchanged_an_error_brings_the_old_folder_back(tmp_path, monkeypatch, error):
    path = tmp_path / "folder"
    write(path, "one")
    real = os.rename

    def rename(source, target):
        if ".saving-" in str(source):
            raise error
        real(source, target)

    monkeypatch.setattr(swap, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises((WeightsError, KeyboardInterrupt)):
        write(path, "two")
    assert (path / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_failing_disk_is_one_sentence(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(swap, "_publish", fail)
    with pytest.raises(WeightsError, match="Input/output error"):
        write(tmp_path / "folder", "one")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_are_removed_and_those_of_others_are_not(tmp_path, dead):
    prefix = swap._prefix(tmp_path / "folder [1]", swap.SAVING)
    other = swap._prefix(tmp_path / "folder", swap.SAVING)
    for name in (f"{prefix}{dead}-x", f"{prefix}{os.getpid()}-x", f"{other}{dead}-x"):
        (tmp_path / name).mkdir()
    write(tmp_path / "folder [1]", "one")
    assert {p.name for p in tmp_path.iterdir()} == {f"{prefix}{os.getpid()}-x", f"{other}{dead}-x", "folder [1]"}


def test_a_folder_that_a_crash_left_under_another_name_comes_back(tmp_path, dead):
    path = tmp_path / "folder"
    aside = tmp_path / f"{swap._prefix(path, swap.REPLACED)}{dead}"
    aside.mkdir()
    (aside / "file").write_text("one")
    with pytest.raises(WeightsError, match="not empty"):
        write(path, "two", overwrite=False)
    assert (path / "file").read_text() == "one"
    aside.mkdir()  # the crash came after the second rename
    write(path, "three")
    assert (path / "file").read_text() == "three"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_exchange_swaps_two_names_in_one_step(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not swap._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names; ends when the tests run on one that can")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot be written"):
        write(tmp_path / "file" / "folder", "one")
