"""Files and folders: atomic writing, the cache folder, and the names of model folders.

A file is written next to its target, flushed to the disk, and renamed over the old one.
"""

import json
import os
import tempfile
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """Write or replace a file in one step: a crash at any moment leaves the old file or the complete new one.

    A symbolic link is followed, as `open` does: what it points to is replaced, not the link.
    """
    file = Path(os.path.realpath(file))
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
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


def model_name(folder: str | Path) -> str:
    """The name of a model folder for people: RUN/CHECKPOINT for a checkpoint of a run, else the folder's own name.

    runs/code/best is `code/best`, although it is a link to a folder called step-00000200. A link to a run is followed
    (runs/latest/best is `code/best` too), and so is a link to a checkpoint.
    """
    path = Path(os.path.abspath(folder))
    root = _run_of(path.resolve())
    if root is None:
        return path.name or str(path)
    while path.parent.resolve() != root and path.is_symlink():
        path = Path(os.path.abspath(path.parent.resolve() / os.readlink(path)))
    return f"{root.name}/{path.name}"


def _run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint belongs to: RUN/checkpoints/step-N, or RUN/best where it is a copy."""
    if not (checkpoint / "meta.json").exists():
        return None
    if checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent
    return checkpoint.parent if (checkpoint.parent / "checkpoints").is_dir() else None


def checkpoint_step(folder: str | Path) -> int | None:
    """The training step of a checkpoint; None for other model folders."""
    try:
        step = json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
