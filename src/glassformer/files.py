"""Atomic writes: a file is written next to its target, flushed to the disk, and renamed over the old one.

Also the folder for everything that can be made again.
"""

import os
import tempfile
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """Write or replace a file in one step: a crash at any moment leaves the old file or the complete new one.

    A symbolic link is followed, as `open` does: what it points to is replaced, not the link.
    """
    file = Path(os.path.realpath(file))
    handle, beside = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(beside, 0o644)  # mkstemp makes it private
        os.replace(beside, file)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """A file's bytes, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Each file of a folder, then its names: after this a power cut cannot leave a folder of empty files."""
    for item in folder.iterdir():
        if item.is_file():
            flush(item)
    flush(folder)


def cache_folder() -> Path:
    """For downloads, token files and compiled kernels: $GLASSFORMER_CACHE, or the user's cache."""
    named = os.environ.get("GLASSFORMER_CACHE")
    if named:
        return Path(named)
    try:
        import platformdirs  # not on the machines that only compute
    except ImportError:
        return Path.home() / ".cache" / "glassformer"
    return Path(platformdirs.user_cache_dir("glassformer", appauthor=False))
