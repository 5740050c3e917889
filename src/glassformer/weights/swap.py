"""A folder written whole or not at all: made beside its place, then exchanged with what was there."""

import contextlib
import ctypes
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from glassformer.files import flush_folder
from glassformer.weights.errors import WeightsError

_MARK = ".saving-"


@contextlib.contextmanager
def staged(path: Path, keep: Callable[[str], bool]) -> Iterator[Path]:
    """A new folder to write into; it takes the place of `path` when the block ends well.

    Files of the old folder that `keep` wants go along (as links, not copies). At every moment `path` is the whole old
    folder or the whole new one: a crash in between leaves only a hidden folder beside it, which the next call removes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead(path)
        mark = f".{path.name}{_MARK}{platform.node()}-{os.getpid()}-"
        stage = Path(tempfile.mkdtemp(prefix=mark, dir=path.parent))
    except OSError as error:
        raise WeightsError(f"{path} cannot be written ({error.strerror}): give another path.") from None
    try:
        os.chmod(stage, 0o777 & ~_umask())
        yield stage
        if path.exists():
            _keep_others(path, stage, keep)
        flush_folder(stage)
        _publish(stage, path)
    except OSError as error:
        raise WeightsError(
            f"{path} could not be written ({error.strerror}): what was there before is untouched."
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # after the exchange this is the old folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _clear_dead(path: Path) -> None:
    """Remove what processes of this machine left behind when they were killed."""
    mark = f".{path.name}{_MARK}{platform.node()}-"
    for left in path.parent.glob(f"{mark}*"):
        pid = left.name.removeprefix(mark).split("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _keep_others(old: Path, new: Path, keep: Callable[[str], bool]) -> None:
    for item in old.iterdir():
        if not keep(item.name) or (new / item.name).exists():
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, new / item.name, symlinks=True, copy_function=_link)
        else:
            _link(str(item), str(new / item.name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _publish(stage: Path, path: Path) -> None:
    if not path.exists():
        os.rename(stage, path)
    elif not _exchange(stage, path):
        # Two renames where the system cannot exchange: for an instant the old folder has another name.
        aside = path.parent / f".{path.name}.previous-{os.getpid()}"
        os.rename(path, aside)
        os.rename(stage, path)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step: renameat2 with RENAME_EXCHANGE on Linux, renamex_np with RENAME_SWAP on macOS."""
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return system.renamex_np(os.fsencode(a), os.fsencode(b), 2) == 0
        here = -100  # AT_FDCWD
        return system.renameat2(here, os.fsencode(a), here, os.fsencode(b), 2) == 0
    except (OSError, AttributeError, TypeError):
        return False
