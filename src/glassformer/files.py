"""Files and folders: atomic writes, the cache folder, and display names of model folders.

A file is written next to its target, flushed to disk, and renamed over the old one.
"""

import json
import os
import tempfile
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """Write or replace a file in one step: a crash at any moment leaves the old file or the complete new one.

    A symbolic link is followed, as `open` does: the file it points to is replaced, not the link.
    """
    file = Path(os.path.realpath(file))
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)  # mkstemp creates it readable by its owner only
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Flush the contents of a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Flush each file of a folder, then its entries, so that a power failure cannot leave a folder of empty files."""
    for item in folder.iterdir():
        if item.is_file():
            flush(item)
    flush(folder)


def cache_folder() -> Path:
    """Return the folder for downloads, token files and compiled kernels: $GLASSFORMER_CACHE, or the user's cache."""
    configured = os.environ.get("GLASSFORMER_CACHE")
    if configured:
        return Path(configured)
    try:
        import platformdirs  # not installed on bare GPU images
    except ImportError:
        return Path.home() / ".cache" / "glassformer"
    return Path(platformdirs.user_cache_dir("glassformer", appauthor=False))


def in_writable_cache(path: str) -> Path:
    """Return a path in the cache folder; if that cannot be written, in a folder of this user for temporary files.

    It is for data that can be made again. What the cache folder already holds is taken from there. The temporary folder
    must belong to this user, and others must not be able to write it.
    """
    folder = cache_folder()
    if (folder / path).exists() or _can_write(folder):
        return folder / path
    user = os.getuid() if hasattr(os, "getuid") else "user"
    other = Path(tempfile.gettempdir()) / f"glassformer-{user}"
    try:
        other.mkdir(mode=0o700, exist_ok=True)
        found = other.lstat()
    except OSError:
        return folder / path
    private = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return (other if private and not other.is_symlink() and _can_write(other) else folder) / path


def _can_write(folder: Path) -> bool:
    """Return True if a file can be made in the folder, which is created if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def model_name(folder: str | Path) -> str:
    """Return the display name of a model folder: RUN/CHECKPOINT for a checkpoint of a run, OWNER/MODEL for a download
    from the Hugging Face hub, otherwise the folder name.

    runs/code/best is `code/best`, although it is a link to a folder called step-00000200. Links to a run
    (runs/latest/best is also `code/best`) and links to a checkpoint are followed.
    """
    path = Path(os.path.abspath(folder))
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    root = _run_of(path.resolve())
    if root is None:
        return path.name or str(path)
    while path.parent.resolve() != root and path.is_symlink():
        path = Path(os.path.abspath(path.parent.resolve() / os.readlink(path)))
    return f"{root.name}/{path.name}"


def _run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run of a checkpoint, which is RUN/checkpoints/step-N, or RUN/best if that is a copy."""
    if not (checkpoint / "meta.json").exists():
        return None
    if checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent
    return checkpoint.parent if (checkpoint.parent / "checkpoints").is_dir() else None


def checkpoint_step(folder: str | Path) -> int | None:
    """Return the training step of a checkpoint; None for other model folders."""
    try:
        step = json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
