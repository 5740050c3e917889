"""The folder of a run: a new one for each run, and `runs/latest`, a link to the run that was started last."""

import os
import re
import shutil
from pathlib import Path

RUNS = Path("runs")
LATEST = RUNS / "latest"


def create(corpus: str) -> Path:
    """Create and return the folder runs/CORPUS-N of a new run, with N one more than any run of this name has.

    The folder is created here, not only named, so that two runs started at the same moment get different ones.
    """
    RUNS.mkdir(parents=True, exist_ok=True)
    name = _plain_name(corpus)
    taken = [path.name.removeprefix(f"{name}-") for path in RUNS.glob(f"{name}-*")]
    number = max((int(text) for text in taken if text.isdecimal()), default=0)
    while True:
        number += 1
        try:
            (RUNS / f"{name}-{number}").mkdir()
        except FileExistsError:
            continue
        return RUNS / f"{name}-{number}"


def _plain_name(corpus: str) -> str:
    """shakespeare, the stem of a text file, the name of a folder, or that of a task."""
    path = Path(corpus.removeprefix("task:")).expanduser()
    name = path.resolve().name if path.is_dir() else path.stem
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def point_latest(folder: str | Path) -> str | None:
    """Point runs/latest to the folder of a run; returns one sentence if that is not possible.

    A real folder of this name, which older versions created, is never replaced: it may hold a run.
    """
    target = Path(folder).resolve()
    if LATEST.exists() and LATEST.resolve() == target:
        return None
    if os.path.lexists(LATEST) and not LATEST.is_symlink():
        return (
            f"{LATEST} is a folder of its own and not a link, so it does not point to this run: rename it, and the "
            "next run creates the link."
        )
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
        parent = RUNS.resolve()
        replace_link(LATEST, Path(os.path.relpath(target, parent)) if target.is_relative_to(parent) else target)
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"{LATEST} could not be linked to this run ({reason}): use {folder} instead."
    return None


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to a folder; an older link is replaced in one step."""
    staged = link.parent / f".{link.name}-{os.getpid()}"
    staged.unlink(missing_ok=True)
    staged.symlink_to(target, target_is_directory=True)
    try:
        os.replace(staged, link)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


def point(name: Path, target: Path) -> None:
    """Make `name` mean the folder `target`, its neighbour: a link, or a copy where links are not possible."""
    try:
        replace_link(name, Path(os.path.relpath(target, name.parent)))
    except (OSError, NotImplementedError):
        staged, old = (name.parent / f".{what}-{os.getpid()}-{name.name}" for what in ("writing", "old"))
        for left in (staged, old):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(target, staged)
        if name.is_symlink():
            name.unlink()
        elif name.exists():
            os.rename(name, old)
        os.rename(staged, name)
        shutil.rmtree(old, ignore_errors=True)
