"""Write a folder or file completely or not at all: it is created next to its target, then exchanged with it.

At every moment the target is the complete old folder or the complete new one. A process that is killed leaves at most
a hidden folder next to the target, `.NAME.saving-HOST-PID-…` or `.NAME.replaced-HOST-PID-…`, which nothing reads and
which the next save to the same target removes.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from glassformer.files import flush, flush_folder
from glassformer.weights.errors import WeightsError

SAVING, REPLACED = "saving", "replaced"


@contextlib.contextmanager
def staged(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new empty folder to write into; it becomes `path` when the block ends without an error.

    With `overwrite` it replaces the folder at `path` as a whole; none of the old files are kept. Without it, only an
    empty folder is replaced.
    """
    with _stage(path) as stage:
        yield stage
        flush_folder(stage)
        _publish(stage, path, overwrite)


@contextlib.contextmanager
def staged_file(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of a file to write; it becomes the file `path` when the block ends without an error.

    With `overwrite` it replaces the file at `path`. Without it, a file that has appeared there is an error.
    """
    with _stage(path) as stage:
        file = stage / path.name
        yield file
        flush(file)
        if overwrite:
            os.replace(file, path)
        else:
            _rename_new(file, path)
        with contextlib.suppress(OSError):  # not every file system can flush a folder
            flush(path.parent)


@contextlib.contextmanager
def _stage(path: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `path`, and remove what is left of it at the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(path)
        stage = Path(tempfile.mkdtemp(prefix=f"{_prefix(path, SAVING)}{os.getpid()}-", dir=path.parent))
    except OSError as error:
        raise WeightsError(f"{path} cannot be written ({error.strerror}): give another path.") from None
    try:
        os.chmod(stage, 0o777 & ~_umask())
        yield stage
    except OSError as error:
        raise WeightsError(
            f"{path} could not be written ({error.strerror or error}): what was there before is unchanged; fix this "
            "and try again, or give another path."
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # after an exchange this is the old folder


def _rename_new(file: Path, path: Path) -> None:
    """Rename a file to a name that does not exist yet."""
    try:
        os.link(file, path)  # unlike a rename, it fails if something has appeared there
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.rename(file, path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _prefix(path: Path, kind: str) -> str:
    return f".{path.name}.{kind}-{platform.node()}-"


def _clear_leftovers(path: Path) -> None:
    """Remove what killed processes of this machine left behind; put an old folder back if its target is missing."""
    for kind in (REPLACED, SAVING):
        prefix = _prefix(path, kind)
        for left in [item for item in path.parent.iterdir() if item.name.startswith(prefix)]:
            pid = left.name.removeprefix(prefix).split("-")[0]
            if not pid.isdigit() or _alive(int(pid)):
                continue
            if kind == REPLACED and not os.path.lexists(path):
                os.rename(left, path)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _publish(stage: Path, path: Path, overwrite: bool) -> None:
    if not overwrite or not os.path.lexists(path):
        os.rename(stage, path)  # replaces an empty folder; fails if something else has appeared there
    elif not _exchange(stage, path):
        _rename_twice(stage, path)
    with contextlib.suppress(OSError):  # not every file system can flush a folder, and the exchange has happened
        flush(path.parent)


def _rename_twice(stage: Path, path: Path) -> None:
    """For file systems that cannot exchange two names. Between the renames the old folder has another name, from
    which an error here, or the next save after a crash, brings it back."""
    aside = path.parent / f"{_prefix(path, REPLACED)}{os.getpid()}"
    try:
        os.rename(path, aside)
        os.rename(stage, path)
    except BaseException:
        if aside.exists() and not os.path.lexists(path):
            os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two paths in one step: renameat2 with RENAME_EXCHANGE on Linux, renamex_np with RENAME_SWAP on macOS.

    Return False if that is not supported.
    """
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return system.renamex_np(os.fsencode(a), os.fsencode(b), 2) == 0
        here = -100  # AT_FDCWD
        return system.renameat2(here, os.fsencode(a), here, os.fsencode(b), 2) == 0
    except (OSError, AttributeError, TypeError):
        return False
