"""A new folder for each run, and runs/latest as a link to the run that was started last."""

import os
from pathlib import Path

import pytest

from glassformer.training import checkpoint


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def no_links(*_, **__):
    raise OSError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("shakespeare", "shakespeare-1"),
        ("task:modular-addition", "modular-addition-1"),
        ("texts/my text.v2.txt", "my-text.v2-1"),
        ("/some/where/..txt", "run-1"),
        (".", None),
    ],
)
def test_a_run_is_named_after_its_corpus(here, corpus, name):
    assert checkpoint.create_run_folder(corpus) == Path("runs") / (name or f"{here.name}-1")


def test_every_run_gets_a_folder_of_its_own_and_numbers_are_not_reused(here):
    assert [checkpoint.create_run_folder("a").name for _ in range(3)] == ["a-1", "a-2", "a-3"]
    (here / "runs" / "a-1").rmdir()
    (here / "runs" / "a-b-9").mkdir()
    assert checkpoint.create_run_folder("a").name == "a-4"


def test_a_folder_taken_at_the_same_moment_is_not_shared(here, monkeypatch):
    checkpoint.create_run_folder("a")
    monkeypatch.setattr(Path, "glob", lambda *_: [])  # what another run sees just before
    assert checkpoint.create_run_folder("a").name == "a-2"


def test_latest_is_a_relative_link_inside_runs_and_an_absolute_one_elsewhere(here):
    assert checkpoint.point_latest(checkpoint.create_run_folder("a")) is None
    assert os.readlink("runs/latest") == "a-1"
    (here / "elsewhere").mkdir()
    assert checkpoint.point_latest("elsewhere") is None
    assert os.readlink("runs/latest") == str((here / "elsewhere").resolve())
    assert sorted(os.listdir("runs")) == ["a-1", "latest"]


def test_a_dangling_link_is_replaced_and_the_run_behind_the_link_keeps_it(here):
    first = checkpoint.create_run_folder("a")
    checkpoint.point_latest(first)
    first.rmdir()
    assert checkpoint.point_latest(checkpoint.create_run_folder("a")) is None
    assert checkpoint.point_latest("runs/latest") is None
    assert Path("runs/latest").resolve().name == "a-1"


def test_a_real_folder_of_that_name_is_left_alone(here):
    kept = here / "runs" / "latest" / "checkpoints"
    kept.mkdir(parents=True)
    result = checkpoint.point_latest(checkpoint.create_run_folder("a"))
    assert result is not None
    assert "not a link" in result
    assert kept.is_dir()
    assert checkpoint.point_latest("runs/latest") is None  # a run of an older version, resumed in it


def test_without_links_it_says_so_and_names_the_folder(here, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", no_links)
    result = checkpoint.point_latest(checkpoint.create_run_folder("a"))
    assert result == "runs/latest could not be linked to this run (Operation not permitted): use runs/a-1 instead."


def test_a_name_is_a_link_or_where_links_are_not_possible_a_copy(here, monkeypatch):
    for name in ("one", "two"):
        (here / "checkpoints" / name).mkdir(parents=True)
        (here / "checkpoints" / name / "file").write_text(name)
    checkpoint.point_link(here / "best", here / "checkpoints" / "one")
    assert os.readlink("best") == "checkpoints/one"
    monkeypatch.setattr(Path, "symlink_to", no_links)
    for name in ("two", "one"):
        checkpoint.point_link(here / "best", here / "checkpoints" / name)
        assert not (here / "best").is_symlink()
        assert (here / "best" / "file").read_text() == name
    assert sorted(os.listdir(".")) == ["best", "checkpoints"]
