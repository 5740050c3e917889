"""Nothing is lost: a failed write leaves the old file, and nothing next to it."""

import os
import stat
from pathlib import Path

import pytest

from glassformer.files import checkpoint_step, flush_folder, in_writable_cache, model_name, write_atomically


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_next_to_it(tmp_path):
    file = tmp_path / "text.txt"
    for data in (b"old", b"new", b""):
        write_atomically(file, data)
        assert file.read_bytes() == data
    assert os.listdir(tmp_path) == ["text.txt"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_an_atomic_write_follows_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    for there in ("old.txt", "new.txt"):
        (tmp_path / "disk" / "old.txt").write_bytes(b"old")
        link = tmp_path / f"to {there}"
        link.symlink_to(f"disk/{there}")
        write_atomically(link, b"new")
        assert link.is_symlink()
        assert (tmp_path / "disk" / there).read_bytes() == b"new"


@pytest.mark.parametrize("victim", ["fsync", "replace", "chmod"])
def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_next_to_it(tmp_path, monkeypatch, victim):
    file = tmp_path / "text.txt"
    file.write_bytes(b"old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, victim, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["text.txt"]


def test_a_folder_is_flushed_file_by_file_and_then_its_names(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.readlink(f"/proc/self/fd/{handle}")))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
    flush_folder(tmp_path)
    assert sorted(flushed[:-1]) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert flushed[-1] == str(tmp_path)


@pytest.fixture
def run(tmp_path):
    checkpoint = tmp_path / "runs" / "code" / "checkpoints" / "step-00000200"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text('{"step": 200}')
    (tmp_path / "runs" / "code" / "best").symlink_to("checkpoints/step-00000200")
    (tmp_path / "runs" / "latest").symlink_to("code")
    (tmp_path / "mine").symlink_to("runs/code/best")
    (tmp_path / "direct").symlink_to("runs/code/checkpoints/step-00000200")
    (tmp_path / "snapshots" / "4f1a").mkdir(parents=True)
    (tmp_path / "gpt2").symlink_to("snapshots/4f1a")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "name", "step"),
    [
        ("runs/code/best", "code/best", 200),
        ("runs/code/best/", "code/best", 200),
        ("runs/latest/best", "code/best", 200),
        ("runs/code/checkpoints/step-00000200", "code/step-00000200", 200),
        ("mine", "code/best", 200),
        ("direct", "code/step-00000200", 200),
        ("gpt2", "gpt2", None),
        ("snapshots/../gpt2", "gpt2", None),
        ("nowhere", "nowhere", None),
        ("hub/models--owner--some-model/snapshots/4f1a", "owner/some-model", None),
        ("hub/models--gpt2/snapshots/4f1a", "gpt2", None),
    ],
)
def test_a_model_folder_has_the_name_of_its_run_and_checkpoint(run, monkeypatch, path, name, step):
    assert (model_name(run / path), checkpoint_step(run / path)) == (name, step)
    monkeypatch.chdir(run)
    assert model_name(path) == name
    if name == "code/best":
        monkeypatch.chdir(path)
        assert model_name(".") == "code/step-00000200"  # where one stands has no other name


def test_best_is_named_after_its_run_where_it_is_a_copy(run):
    (run / "runs" / "code" / "best").unlink()
    (run / "runs" / "code" / "best").mkdir()
    (run / "runs" / "code" / "best" / "meta.json").write_text("{}")
    assert model_name(run / "runs" / "code" / "best") == "code/best"
    assert checkpoint_step(run / "runs" / "code" / "best") is None


def test_what_can_be_made_again_goes_to_a_temporary_folder_if_the_cache_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"glassformer-{os.getuid()}"
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    assert in_writable_cache("tokens/a") == tmp_path / "cache" / "tokens" / "a"
    assert not own.exists()
    monkeypatch.setenv("GLASSFORMER_CACHE", os.devnull)
    assert in_writable_cache("tokens/a") == own / "tokens" / "a"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_temporary_folder_that_others_can_write_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("GLASSFORMER_CACHE", os.devnull)
    own = tmp_path / f"glassformer-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    assert in_writable_cache("tokens") == Path(os.devnull) / "tokens"
    own.rmdir()
    (tmp_path / "elsewhere").mkdir()
    own.symlink_to(tmp_path / "elsewhere")
    assert in_writable_cache("tokens") == Path(os.devnull) / "tokens"


def test_what_the_cache_holds_is_taken_from_there_although_it_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("glassformer.files._can_write", lambda folder: False)
    (tmp_path / "cache" / "tokens").mkdir(parents=True)
    assert in_writable_cache("tokens") == tmp_path / "cache" / "tokens"
