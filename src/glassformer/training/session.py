"""Prepare a run to start: prepare the corpus, fit the model to the tokenizer, read the checkpoint to resume from."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from glassformer.config import Special, to_toml
from glassformer.training import checkpoint
from glassformer.training.data import corpus
from glassformer.training.data.source import Source, prepare
from glassformer.training.data.tasks import TaskData
from glassformer.training.distributed import group
from glassformer.training.run import Note, Run, read_run, run_to_dict, with_model

Resume = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Session:
    """A run whose model has the vocabulary of the tokenizer, its data, and the checkpoint that it resumes from."""

    run: Run
    data: Any
    """`Prepared` for a text, or `TaskData`; both are a `Source`."""
    resume: Resume | None = None


def open_session(run: Run) -> Session:
    """Prepare the data and fit the model's vocabulary to the tokenizer."""
    group.check(run)
    data = _prepare(run)
    return Session(fit_model(run, data), data)


def resume_session(path: str, changes: tuple[str, ...] = (), note: Note | None = None) -> Session:
    """Continue from a checkpoint, with the run stored in it; only optim, schedule, loop and the like may be changed.

    The run continues in the folder where it is now, also after that was moved, unless `out` is changed.
    """
    run, meta, model, extra = checkpoint.read(path)
    run = _in_its_folder(run, checkpoint.find(path))
    if changes:
        changed = read_run(to_toml(run_to_dict(run)), changes, "the checkpoint's run", note)
        if (changed.model, changed.data, changed.task) != (run.model, run.data, run.task):
            raise checkpoint.CheckpointError(
                "a resumed run keeps its model and data: change optim, schedule or loop only."
            )
        if Path(changed.out).resolve() != Path(run.out).resolve() and checkpoint.steps(Path(changed.out)):
            raise checkpoint.CheckpointError(
                f"out={changed.out} already holds another run: give a new folder, or leave out `out` to continue in "
                f"{run.out}."
            )
        run = changed
    group.check(run)
    if meta["step"] >= run.loop.steps:
        raise checkpoint.CheckpointError(
            f"the run is finished ({meta['step']} of {run.loop.steps} steps): go further with --set loop.steps=N."
        )
    data = _prepare(run)
    held = hashlib.sha256(data.tokenizer.to_json().encode()).hexdigest()
    if held != meta["sha256"]["tokenizer.json"]:
        raise checkpoint.CheckpointError(
            f"the corpus {run.data.corpus!r} now gives another tokenizer than the checkpoint's: it was changed since."
        )
    return Session(run, data, (meta, model, extra))


def _in_its_folder(run: Run, found: Path) -> Run:
    """Return the run with `out` as the folder of its checkpoint `found`; outside a run folder, `out` stays."""
    root = found.parent.parent
    if found.parent.name != "checkpoints" or Path(run.out).resolve() == root:
        return run
    return dataclasses.replace(run, out=str(root))


def _prepare(run: Run) -> Source:
    if run.task is not None:
        return TaskData(run.task)
    given = run.data
    found = corpus.find(given.corpus)
    if given.cache is not None:
        out = Path(given.cache)
    else:
        words = (given.corpus, given.tokenizer, str(given.vocab_size), str(given.validation))
        if Path(given.corpus).exists():
            words = (str(Path(given.corpus).resolve()), *words[1:])
        digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
        out = corpus.cache_folder() / "tokens" / f"{found.name}-{digest}"
    with _locked(out):
        return prepare(
            found,
            given.tokenizer,
            out,
            vocab_size=given.vocab_size,
            validation_fraction=given.validation,
            context=run.context,
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on token files: the first process writes them, the others wait and read them.

    It is a file lock of the system, which ends with its process. Where there is no such lock, nobody waits.
    """
    try:
        import fcntl

        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.parent / f".{folder.name}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def fit_model(run: Run, data: Source) -> Run:
    """Return the run with the vocabulary of its data's tokenizer."""
    return fit_vocabulary(run, data.tokenizer.vocab_size)


def fit_vocabulary(run: Run, size: int) -> Run:
    """Return the run with `size` token ids, plus one where the objective needs a mask or a start token."""
    match run.objective:
        case "masked":
            return with_model(run, vocab_size=size + 1, special=Special())
        case "seq2seq":
            return with_model(run, vocab_size=size + 1, special=Special(start=size))
        case _:
            return with_model(run, vocab_size=size, special=Special())
