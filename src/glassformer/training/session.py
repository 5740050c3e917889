"""Prepare a run to start: prepare the corpus, fit the model to the tokenizer, read the checkpoint to resume from."""

import contextlib
import dataclasses
import glob
import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.config import ConfigError, Special, to_toml
from glassformer.model import Model, build
from glassformer.model.device import opening_gpu
from glassformer.model.transformer import allocate, init_weights, initial_values
from glassformer.training import checkpoint
from glassformer.training.data.source import Prepared, Source, prepare_corpus
from glassformer.training.data.tasks import TaskData
from glassformer.training.data.tokenizer import Tokenizer, from_json
from glassformer.training.distributed import group
from glassformer.training.run import PARTS, Note, Run, read_run, run_to_dict, with_model

KEPT = ("model", "data", "task", "start", "lora", "chat")
"""Parts of a run that stay the same when it is resumed."""
Resume = tuple[dict[str, Any], checkpoint.StoredTensors, checkpoint.StoredTensors]
"""meta.json, weights, and everything else of a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Session:
    """A run whose model has the vocabulary of the tokenizer, its data, and the checkpoint that it resumes from."""

    run: Run
    data: Any
    """`Prepared` for a text, or `TaskData`; both are a `Source`."""
    resume: Resume | None = None
    notes: tuple[str, ...] = ()
    """How the run extends the model that it starts from, in sentences."""


def open_session(run: Run) -> Session:
    """Prepare the data and fit the model's vocabulary to the tokenizer."""
    group.check(run)
    with opening_gpu() if run.machine.device != "cpu" and group.world_size() == 1 else contextlib.nullcontext():
        return _open(run)


def _open(run: Run) -> Session:
    if not run.start.model:
        data = _prepare(run)
        return _opened(fit_model(run, data), data)
    from glassformer.training.tuning.start import check, start_tokenizer

    run, notes = check(run)
    data = _prepare(run, start_tokenizer(run))
    _check_ids(run, data)
    return _opened(run, data, notes)


def _opened(run: Run, data: Any, notes: Sequence[str] = ()) -> Session:
    """Return a session; conversations also report what was read, and name the token that ends an answer."""
    if run.chat is None:
        return Session(_recorded(run, data), data, notes=tuple(notes))
    from glassformer.training.data.chats import with_end_token

    return Session(with_end_token(run, data), data, notes=(*notes, *data.notes))


def _recorded(run: Run, data: Source) -> Run:
    """Return the run with the hash of its tokens, so that a checkpoint knows them and ranks can compare them."""
    digest = getattr(data, "digest", "")  # tasks and conversations have none
    return dataclasses.replace(run, data=dataclasses.replace(run.data, sha256=digest))


def _check_ids(run: Run, data: Source) -> None:
    """Refuse a tokenizer that gives ids which the model of [start] does not have."""
    known = run.model.vocab_size
    if data.tokenizer.vocab_size <= known:
        return
    if not isinstance(data, Prepared):
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.vocab_size:,} tokens, but start.model only {known:,}: name the missing "
            "ones in data.add_tokens, or give the tokenizer that the model was trained with."
        )
    largest = max((int(part.max()) for part in (data.train, data.val) if len(part)), default=0)
    if run.data.tokenizer != "start" or largest >= known:
        raise ConfigError(
            f"data.tokenizer={run.data.tokenizer!r} has {data.tokenizer.vocab_size:,} tokens, but start.model only "
            f"{known:,}: give the tokenizer that the model was trained with."
        )


def starting_model(run: Run, device: str | torch.device, resumed: bool, meanwhile: Callable[[Model], object]) -> Model:
    """Return the model of the first step: fresh, or that of [start]. A resumed run gets its weights afterwards.

    On device "meta" it has no values: `starting_values` has them. `meanwhile` is called with the model, while fresh
    weights are drawn, or after others are loaded. It must not read weights.
    """
    tuned = run.start.model or run.optim.freeze
    if torch.device(device).type == "meta":
        model = allocate(run.model, device)
        if tuned:
            from glassformer.training.tuning.prepare import hold_and_freeze

            hold_and_freeze(model, run)
    elif tuned:
        from glassformer.training.tuning.prepare import tuned_model

        model = tuned_model(run, device, resumed)
    else:
        model = allocate(run.model, device)
        init_weights(model, run.seed, lambda: meanwhile(model))
        return model
    meanwhile(model)
    return model


def starting_values(run: Run, resumed: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the first step by name, one after the other; of a resumed run, those that are frozen.

    Those of [start] are views of its files: what is not copied is not read.
    """
    if resumed and run.lora is None:
        return
    if not run.start.model:
        yield from initial_values(build(run.model, device="meta"), run.seed)
        return
    from glassformer.training.tuning.start import start_state

    state = start_state(run, None, copy=False)
    if run.lora is not None and not resumed:
        from glassformer.training.tuning.lora import adapter_values

        yield from adapter_values(run, state)
    yield from state.items()


@torch.no_grad()
def load_weights(run: Run, model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Load the weights of a checkpoint, one tensor after the other: of the whole model, or of its adapters."""
    if run.lora is None:
        own = model.state_dict()
        if own.keys() != tensors.keys():
            raise RuntimeError(f"the weights differ in {min(own.keys() ^ tensors.keys())}")
        for name, held in own.items():
            if (value := tensors[name]).shape != held.shape:
                raise RuntimeError(f"{name} has the shape {tuple(value.shape)}, but the model {tuple(held.shape)}")
            held.copy_(value)
        return
    from glassformer.training.tuning.lora import load_adapter

    load_adapter(model, tensors)


def resume_session(path: str, changes: tuple[str, ...] = (), note: Note | None = None) -> Session:
    """Continue from a checkpoint, with the run stored in it; only optim, schedule, loop and the like may be changed.

    The run continues in the folder where it is now, also after that was moved, unless `out` is changed.
    """
    run, meta, model, extra = checkpoint.read(path)
    run = _in_its_folder(run, checkpoint.find(path))
    _check_order(run)
    if changes:
        changed = read_run(to_toml(run_to_dict(run)), changes, "the checkpoint's run", note)
        if not changed.data.sha256:  # take the tokens that the corpus has now
            run = dataclasses.replace(run, data=dataclasses.replace(run.data, sha256=""))
        if any(getattr(changed, part) != getattr(run, part) for part in KEPT):
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
    if run.lora is not None:
        from glassformer.training.tuning.start import check

        check(run)  # the checkpoint holds adapters only: the model they belong to must be unchanged
    if meta["step"] >= run.loop.steps:
        raise checkpoint.CheckpointError(
            f"the run is finished ({meta['step']} of {run.loop.steps} steps): go further with --set loop.steps=N."
        )
    found = checkpoint.find(path) / "tokenizer.json"
    data = _prepare(run, from_json(found.read_text(encoding="utf-8")) if run.start.model else None)
    _check_tokenizer(run, data, meta)
    return Session(_recorded(run, data), data, (meta, model, extra))


def _check_tokenizer(run: Run, data: Source, meta: dict[str, Any]) -> None:
    held = hashlib.sha256(data.tokenizer.to_json().encode()).hexdigest()
    if held != meta["sha256"]["tokenizer.json"]:
        raise checkpoint.CheckpointError(
            f"the corpus {run.data.corpus!r} now gives another tokenizer than the checkpoint's: it was changed since."
        )


def open_or_resume(run: Run) -> Session:
    """Continue the run that the folder `out` holds, or start it if that has no checkpoint yet (`--resume auto`).

    The settings are those of `run`, so that optim, schedule, loop and machine may be changed. A finished run is
    returned as well: its checkpoint has all steps.
    """
    if not run.out:
        raise ConfigError("--resume auto continues the run of a folder, and this run names none: add --out FOLDER.")
    if not checkpoint.steps(Path(run.out)):
        return open_session(run)
    held, meta, model, extra = checkpoint.read(run.out)
    _check_order(held)
    digest = run.data.sha256 or held.data.sha256  # a corpus that has grown since is read as it was
    session = open_session(dataclasses.replace(run, data=dataclasses.replace(run.data, sha256=digest)))
    if other := [part for part in (*KEPT, "seed") if getattr(session.run, part) != getattr(held, part)]:
        raise checkpoint.CheckpointError(
            f"{run.out} holds another run, which differs in {', '.join(other)}: give the settings of that run, or "
            "start elsewhere with --out FOLDER."
        )
    _check_tokenizer(run, session.data, meta)
    return dataclasses.replace(session, resume=(meta, model, extra))


def _check_order(run: Run) -> None:
    """Refuse a checkpoint of a version that read epochs in another order. Later ones record a hash of the tokens."""
    if run.data.order == "epoch" and not run.data.sha256 and run.task is None and run.chat is None:
        raise checkpoint.CheckpointError(
            "the checkpoint is of a version whose epochs had another order (data.order='epoch'), so it cannot be "
            "continued exactly: start a new run from its weights with --from CHECKPOINT."
        )


def _in_its_folder(run: Run, found: Path) -> Run:
    """Return the run with `out` as the folder of its checkpoint `found`; outside a run folder, `out` stays."""
    root = found.parent.parent
    if found.parent.name != "checkpoints" or Path(run.out).resolve() == root:
        return run
    return dataclasses.replace(run, out=str(root))


def _prepare(run: Run, tokenizer: Tokenizer | None = None) -> Source:
    """Return the data of a run. `tokenizer` is that of the model it starts from, if this has one."""
    if run.task is not None:
        return TaskData(run.task)
    if run.chat is not None:
        from glassformer.training.data.chats import prepare_chats  # not needed by other runs

        return prepare_chats(run, tokenizer)
    if run.data.mix:
        from glassformer.training.data.mixture import prepare_mixture  # not needed by other runs

        mixture = prepare_mixture(run.data, tokenizer)
        mixture.check(run.context)
        return mixture
    prepared = prepare_corpus(run.data, tokenizer)
    prepared.check(run.context)
    return prepared


def read_run_file(path: Path) -> str | None:
    """Return the TOML text of a run file; None for a corpus to train on: a text or data file, a folder, a pattern.

    A file with the suffix .toml is a run file. A file with another suffix is one if it is TOML whose top level holds
    parts of a run and nothing else.
    """
    is_toml = path.suffix.lower() == ".toml"
    if path.is_dir():
        if (path / "run.toml").exists() and ((path / "checkpoints").is_dir() or (path / "meta.json").exists()):
            raise ConfigError(
                f"{path} is the folder of a run: continue it with --resume {path}, or train the same run anew with "
                f"{path / 'run.toml'} --out FOLDER."
            )
        return None
    try:
        if not is_toml and path.is_file() and path.stat().st_size > LARGEST_RUN_FILE:
            return None
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if glob.has_magic(str(path)):
            return None  # a pattern of text or data files
        raise ConfigError(f"{path} does not exist: give a run file, a text file or a folder of text files.") from None
    except UnicodeDecodeError as error:
        if not is_toml:
            return None  # the corpus reader reports what is wrong with it
        raise ConfigError(f"{path} is not TOML: byte {error.start} is not UTF-8. Give a run file.") from None
    return text if is_toml or _is_run(text) else None


LARGEST_RUN_FILE = 1 << 20
"""Bytes. A longer file without the suffix .toml is a text, whatever it holds."""


def _is_run(text: str) -> bool:
    try:
        keys = tomllib.loads(text).keys()
    except tomllib.TOMLDecodeError:
        return False
    return bool(keys) and keys <= PARTS


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
