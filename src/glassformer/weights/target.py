"""Check whether a model may be written to a path, and whether a folder may be replaced.

A folder is replaced only if the caller allows it and it contains a model or a checkpoint and nothing else. Everything
else is always rejected: files, symbolic links, folders of training runs, folders with other files.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.folder import ADAPTER, CONFIG, GENERATION, RUN, TOKENIZER_FILES, TOML
from glassformer.weights.tensors import INDEX, SINGLE
from glassformer.weights.verify import REFERENCE

CHECKPOINT = ("meta.json", "optimizer.safetensors")
"""Files of a training checkpoint in addition to its model."""
LOG, CHECKPOINTS = "log.jsonl", "checkpoints"
"""Entries of the folder of a training run, next to its run.toml."""
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
ONNX = ("model.onnx", "encoder_model.onnx", "decoder_model.onnx")
"""Graphs of an ONNX folder; the weights of a large one are next to it, with the suffix .data."""
_NAMES = {CONFIG, GENERATION, TOML, RUN, SINGLE, INDEX, REFERENCE, *TOKENIZER_FILES, *CHECKPOINT, *ONNX}
_NAMES |= {f"{name}.data" for name in ONNX} | {*ADAPTER, "adapter_model.safetensors", "adapter.safetensors"}


def check_target(path: str | Path, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that may be written, or raise a WeightsError.

    A path that does not exist and an empty folder may always be written; a model or checkpoint only with `overwrite`.
    """
    given = Path(path).expanduser()
    try:
        if given.is_symlink():
            raise WeightsError(
                f"{given} is a symbolic link to {os.readlink(given)}, and a model is never written through a link: "
                "give the path of the folder itself."
            )
        target = given.resolve()
        if not target.exists():
            return target
        if not target.is_dir():
            raise WeightsError(f"{target} is a file, and a model is saved as a folder: give another path.")
        if Path.cwd().is_relative_to(target):
            raise WeightsError(f"{target} is the current folder or contains it: give the path of a new folder.")
        names = sorted(item.name for item in target.iterdir())
        if names:
            _check_model_folder(target, names)
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{given} cannot be written ({reason}): give another path.") from None
    if names and not overwrite:
        raise WeightsError(
            f"{target} already holds a model: pass --force (in Python: overwrite=True) to replace it, or give "
            "another path."
        )
    return target


def check_file_target(path: str | Path, overwrite: bool, is_ours: Callable[[Path], bool]) -> Path:
    """Return the absolute path of a file that may be written, or raise a WeightsError.

    A file is replaced only with `overwrite`, and only if `is_ours` says that it has the format that is written.
    """
    given = Path(path).expanduser()
    if given.is_symlink():
        raise WeightsError(
            f"{given} is a symbolic link, and a model is never written through a link: give the path of the file "
            "itself."
        )
    try:
        target = given.resolve()
        if target.is_dir():
            raise WeightsError(f"{target} is a folder, and this format is a file: give the path of a file.")
        if target.exists() and not is_ours(target):
            raise WeightsError(f"{target} is a file of another format, which is never replaced: give another path.")
        if target.exists() and not overwrite:
            raise WeightsError(
                f"{target} already holds a model: pass --force (in Python: overwrite=True) to replace it, or give "
                "another path."
            )
    except OSError as error:
        raise WeightsError(f"{given} cannot be written ({error.strerror}): give another path.") from None
    return target


def _check_model_folder(folder: Path, names: list[str]) -> None:
    """Raise WeightsError unless the folder contains a model and nothing else."""
    if LOG in names or CHECKPOINTS in names:
        raise WeightsError(f"{folder} is the folder of a training run, which is never replaced: give another path.")
    is_model = {CONFIG, TOML, RUN}.intersection(names) and {SINGLE, INDEX, *ONNX}.intersection(names)
    if not is_model and not set(ADAPTER).intersection(names):
        raise WeightsError(
            f"{folder} is not empty and not a model folder (it needs {CONFIG} or {TOML}, and {SINGLE} or {INDEX}): it "
            "is never replaced, give another path."
        )
    others = [name for name in names if not _is_model_file(folder / name)]
    if others:
        raise WeightsError(
            f"{folder} also contains files that are not part of a model ({summarize(others)}): it is never replaced, "
            "give another path or move these files."
        )


def _is_model_file(file: Path) -> bool:
    return file.is_file() and (file.name in _NAMES or _SHARD.fullmatch(file.name) is not None)


def check_apart(source: Path, target: Path) -> None:
    """Raise WeightsError if the two folders are the same or one is inside the other, whatever their paths are."""
    source, target = source.expanduser().resolve(), target.expanduser().resolve()
    if _same(source, target):
        raise WeightsError(
            f"{target} is the source and the target: a model is never converted onto itself, give another target."
        )
    if any(_same(source, parent) for parent in target.parents):
        raise WeightsError(f"the target {target} lies inside the source {source}: give a target outside of it.")
    if any(_same(target, parent) for parent in source.parents):
        raise WeightsError(f"the source {source} lies inside the target {target}: give a target outside of it.")


def _same(a: Path, b: Path) -> bool:
    """Return True if both paths are the same folder, also by a bind mount or on a case-insensitive file system."""
    return a == b or (a.exists() and b.exists() and a.samefile(b))
