"""Nothing is lost: a failed write leaves the old file, and nothing beside it."""

import os
import stat

import pytest

from glassformer.files import flush_folder, write_atomically


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_beside(tmp_path):
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
def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_beside(tmp_path, monkeypatch, victim):
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
