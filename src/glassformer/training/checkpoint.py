"""The folder of a run and its checkpoints: written atomically, never pickled, and verified when read.

    runs/CORPUS-N                        the folder RUN of a run that names none; runs/latest links to the newest one
    RUN/run.toml                         the resolved run
    RUN/log.jsonl                        one line per event
    RUN/checkpoints/step-00000250/       model.toml, model.safetensors, tokenizer.json: a model folder `gf.load` reads
                                         optimizer.safetensors, run.toml, meta.json (step, best, hashes, versions)
                                         with [lora]: adapter.toml, adapter.safetensors in place of the model
    RUN/best, RUN/last                   links to two of them, replaced in one step; copies where links are not possible

A checkpoint is written to a temporary folder, flushed, and renamed; then the links move; then old ones are removed,
each renamed before its files are deleted. At every moment each name is a complete checkpoint.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from glassformer.config import ConfigError, to_dict, to_toml
from glassformer.errors import GlassformerError
from glassformer.files import flush, flush_folder, write_atomically
from glassformer.training.distributed.group import ALONE, Group, is_main
from glassformer.training.run import Run, read_run, run_to_dict
from glassformer.training.sinks import IDS
from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import Stored, entries, open_safetensors, release_all

FORMAT = 1
OWN = ("optimizer.safetensors", "tokenizer.json", "run.toml")
FILES = ("model.toml", "model.safetensors", *OWN)
ADAPTER_FILES = ("adapter.toml", "adapter.safetensors", *OWN)
"""Files of a run with [lora]: adapters instead of a model."""
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Files of the model that a run starts from which belong to its tokenizer: copied, so that they are saved with it."""
MODEL_FILES = ("config.json", "model.toml", "model.safetensors", "model.safetensors.index.json")
RUNS = Path("runs")
LATEST = RUNS / "latest"
StoredTensors = Mapping[str, Stored]
"""Tensors of a file by name, whose values have not been read."""
_NAME = re.compile(r"step-\d{8}(-\d+)?")


class CheckpointError(GlassformerError):
    """A checkpoint cannot be used. The message is one sentence."""


def write(
    run: Run,
    step: int,
    model: dict[str, Tensor],
    extra: dict[str, Tensor],
    tokenizer_json: str,
    meta: dict[str, Any],
    group: Group = ALONE,
) -> Path:
    """Write and return RUN/checkpoints/step-N. `extra` is everything but the weights: optimizer, RNG state, average.

    All ranks of the group call it, each with its own parts of the tensors; rank 0 writes everything else.
    """
    stage: Path | None = None
    config, weights = (ADAPTER_FILES if run.lora else FILES)[:2]

    def seal(stage: Path, target: Path) -> None:
        hashes = {name: _sha256(stage / name) for name in (config, weights, *OWN)}
        text = json.dumps({"format": FORMAT, "step": step, "sha256": hashes, **meta}, indent=1)
        (stage / "meta.json").write_text(text, encoding="utf-8")
        flush_folder(stage)
        os.rename(stage, target)
        flush(target.parent)

    try:
        stage, target = group.on_main(lambda: _stage(run, step, tokenizer_json))
        group.write(model, stage / weights)
        group.write(extra, stage / "optimizer.safetensors")
        group.on_main(lambda: seal(stage, target))
    except OSError as error:
        if stage is not None and group.is_main:
            shutil.rmtree(stage, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({error.strerror or error}): the earlier ones are "
            f"whole, resume with --resume {run.out} when there is room."
        ) from error
    return target


def _stage(run: Run, step: int, tokenizer_json: str) -> tuple[Path, Path]:
    """Create the temporary folder of a checkpoint with all files but the tensors; return it and its final name."""
    folder = Path(run.out) / "checkpoints"
    target = folder / f"step-{step:08d}"
    again = 0
    while target.exists():  # a run that was resumed from an earlier step: nothing is overwritten
        again += 1
        target = folder / f"step-{step:08d}-{again}"
    stage = folder / f".writing-{os.getpid()}-{target.name}"
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    stage.mkdir()
    try:
        (stage / (ADAPTER_FILES if run.lora else FILES)[0]).write_text(_description(run), encoding="utf-8")
        (stage / "run.toml").write_text(to_toml(run_to_dict(run)), encoding="utf-8")
        (stage / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        for name in SIDE_FILES:
            for source in (*([run.start.model] if run.start.model else []), run.out):
                if (Path(source) / name).is_file():
                    shutil.copyfile(Path(source) / name, stage / name)
    except OSError:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return stage, target


def _description(run: Run) -> str:
    """Return model.toml, or adapter.toml of a run that trains adapters."""
    if run.lora is None:
        return to_toml(to_dict(run.model))
    from glassformer.training.tuning.lora import describe_adapter  # not needed by other runs

    return describe_adapter(run)


def publish(run: Run, checkpoint: Path, is_best: bool) -> None:
    """Point `last` (and `best`) at a checkpoint, then drop what is neither best nor among the newest `keep`."""
    root = Path(run.out)
    for name in ("last", *(["best"] if is_best else [])):
        point_link(root / name, root / "checkpoints" / checkpoint.name)
    flush(root)
    linked = {(root / name).resolve().name for name in ("best", "last") if (root / name).exists()}
    for old in steps(root)[: -run.loop.keep]:
        if old.name not in linked:
            hidden = old.parent / f".old-{os.getpid()}-{old.name}"
            os.rename(old, hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def steps(root: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(p for p in (root / "checkpoints").glob("step-*") if _NAME.fullmatch(p.name))


def find(path: str | Path) -> Path:
    """The checkpoint folder that `path` means: a checkpoint, or the newest one of a run."""
    given = Path(path).expanduser()
    if (given / "meta.json").exists():
        return given.resolve()
    if not given.is_dir():
        raise CheckpointError(f"{given} does not exist: give the folder of a run or of one of its checkpoints.")
    if (given / "last" / "meta.json").exists():
        return (given / "last").resolve()
    found = steps(given)
    if not found:
        raise CheckpointError(f"{given} holds no checkpoint (no checkpoints/step-*): start the run again.")
    return found[-1]


def read(path: str | Path) -> tuple[Run, dict[str, Any], StoredTensors, StoredTensors]:
    """(run, meta, model tensors, extra tensors) of a checkpoint, every file checked against its hash.

    The values of tensors are read when they are needed (`copy_stored`). Of several ranks, the first checks the hashes.
    """
    folder = find(path)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        wanted = meta["sha256"]
        if (
            meta["format"] != FORMAT
            or set(wanted) not in (set(FILES), set(ADAPTER_FILES))
            or not isinstance(meta["step"], int)
        ):
            raise KeyError("format")
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder} is not a training checkpoint of this version (meta.json): give another."
        ) from None
    for name in wanted:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} lacks {name}: it is damaged, resume from an earlier checkpoint.")
        if is_main() and _sha256(folder / name) != wanted[name]:
            raise CheckpointError(
                f"{folder / name} is not what was written: it is damaged, resume from an earlier one."
            )
    try:
        run = read_run((folder / "run.toml").read_text(encoding="utf-8"), source=str(folder / "run.toml"))
        weights = (ADAPTER_FILES if run.lora else FILES)[1]
        return run, meta, *(entries(open_safetensors(folder / n)) for n in (weights, "optimizer.safetensors"))
    except (WeightsError, ConfigError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def start_run(run: Run, resumed: bool, force: bool = False) -> Run:
    """Create the folder of a run, write the resolved run.toml into it, and return the run with that folder as `out`.

    A new run replaces another one only with `force`, which removes what a run writes and no other file. A folder with
    the same run.toml and no checkpoint is a run that was stopped before its first one: it simply starts again.
    """
    root = Path(run.out or RUNS)
    try:
        root = Path(run.out) if run.out else create_run_folder(run.data.corpus)
        run = dataclasses.replace(run, out=str(root))
        text = to_toml(run_to_dict(run)).encode()
        if not resumed:
            _check_free(root, text)
        if not resumed and (held := _held_run(root, text)):
            if not force:
                way = f"continue it with --resume {root}" if steps(root) else "start it with its own settings"
                raise CheckpointError(
                    f"{root} already holds a run ({held}): {way}, start elsewhere with --out FOLDER, or replace it "
                    "with --force."
                )
            _remove_run(root)
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / "run.toml", text)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be written ({error.strerror or error}): give another `out`.") from None
    return run


def _held_run(root: Path, text: bytes) -> str:
    """What shows that a folder belongs to another run than that of the resolved run.toml `text`; empty if nothing."""
    if found := steps(root):
        return found[-1].name
    file = root / "run.toml"
    return file.name if file.exists() and file.read_bytes() != text else ""


def _remove_run(root: Path) -> None:
    loggers = ("tensorboard", "wandb", "mlflow.db", IDS)
    for name in ("best", "last", "checkpoints", *loggers, "log.jsonl", "run.toml"):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_free(root: Path, text: bytes) -> None:
    """Refuse, even with --force, a folder in which a new run would replace a user's file or hide a model.

    A run.toml with a log.jsonl, or the run.toml `text` of this very run, is what a run leaves that was stopped before
    its first checkpoint: it may be replaced.
    """
    if steps(root):
        return
    taken = [name for name in MODEL_FILES if (root / name).exists()]
    taken += [name for name in ("best", "last") if (root / name).exists() and not (root / name).is_symlink()]
    own = [name for name in ("run.toml", "log.jsonl") if (root / name).exists()]
    same = own == ["run.toml"] and (root / "run.toml").read_bytes() == text
    taken += own if len(own) == 1 and not same else []
    if taken:
        raise CheckpointError(
            f"{root} already holds {', '.join(taken)}, with which the files of a run would collide: start elsewhere "
            "with --out FOLDER."
        )


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    try:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # raised by safetensors for a full disk
        raise OSError(28 if "space" in str(error).lower() else 5, str(error)) from error


def copy_stored(stored: Stored, part: tuple[slice, ...] = ()) -> Tensor:
    """Return a copy of a stored tensor, or of a part of it: a change of a mapped file must not change the run."""
    copied = stored.read()[part].clone()
    release_all()
    return copied


class OnDemand(Mapping[str, Tensor]):
    """Stored tensors by name, each read by `read(name, stored)` when it is asked for."""

    def __init__(self, stored: StoredTensors, read: Callable[[str, Stored], Tensor]):
        self.stored, self.read = stored, read

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(folder: Path) -> None:
    """Remove folders that a killed process left incomplete."""
    for left in [*folder.glob(".writing-*"), *folder.glob(".old-*")]:
        shutil.rmtree(left, ignore_errors=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators of dropout."""
    out = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        out["rng/cuda"] = torch.cuda.get_rng_state(device)
    return out


def set_random_state(tensors: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    if device.type == "cuda" and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"], device)


def create_run_folder(corpus: str) -> Path:
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


def point_link(name: Path, target: Path) -> None:
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
