"""`gf.size(subject)`: the size of a config, a run or a model, or of a preset, a folder or a TOML file by name."""

import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer import sizing
from glassformer.config import ConfigError, ModelConfig, from_dict, presets
from glassformer.sizing import Dtype, Optimizer, Sheet

if TYPE_CHECKING:
    from glassformer.training import Run

ACCEPTED = "a ModelConfig, a run, a model built or loaded here, or the name of a preset, a model folder or a TOML file"
RUN_KEYS = {
    "model",
    "start",
    "data",
    "task",
    "optim",
    "schedule",
    "loss",
    "loop",
    "checkpoint",
    "machine",
    "probe",
    "lora",
    "chat",
    "seed",
    "out",
}
"""Top-level keys of a run file. A model config has none of them."""


def size(
    subject: object,
    batch: int | None = None,
    context: int | None = None,
    dtype: Dtype | None = None,
    optimizer: Optimizer | None = None,
    source: int | None = None,
    changes: tuple[str, ...] = (),
) -> Sheet:
    """Return what a model costs: parameters, FLOPs, memory and compute-optimal training tokens.

    `subject` is a ModelConfig, a run, a model of this package, or text that names one: a preset, a model folder, or a
    TOML file with a model config or a run. A run gives the defaults of the other arguments. Otherwise they are: one
    sequence, the model's max_len (512 tokens where it has none), float32, AdamW. `source` is the length of the input of
    the encoder in an encoder-decoder; its default is the context. `changes` are applied to a run file, as in
    `glass train --set`: ("machine.precision=bfloat16",).

    >>> gf.size("gpt2").parameters
    124439808
    """
    found = resolve(subject, changes)
    if not isinstance(found, ModelConfig):
        from glassformer.training.forecast import sheet

        name = str(subject) if isinstance(subject, str | os.PathLike) else "the run"
        return sheet(found, batch, context, dtype, optimizer, source, name)
    return sizing.size(
        found,
        batch=1 if batch is None else batch,
        context=context,
        dtype=dtype or "float32",
        optimizer=optimizer or "adamw",
        source=source,
    )


def resolve(subject: object, changes: tuple[str, ...] = ()) -> "ModelConfig | Run":
    """Return the config or the run that `subject` means, without building a model. Raise TypeError for other types."""
    found = _resolve(subject, changes)
    if changes and (isinstance(found, ModelConfig) or found is subject):
        raise ConfigError(f"{changes[0]!r} changes a run file, and {subject!s:.60} is none: leave it out.")
    return found


def _resolve(subject: object, changes: tuple[str, ...]) -> "ModelConfig | Run":
    if isinstance(subject, ModelConfig) or _is_run(subject):
        return subject  # type: ignore[return-value]
    if isinstance(subject, str | os.PathLike):
        return _named(subject, changes)
    config = getattr(subject, "config", None)
    if isinstance(config, ModelConfig):
        return config
    raise TypeError(f"size takes {ACCEPTED}, not {type(subject).__name__}.")


def config_of(subject: object) -> ModelConfig:
    """Return the model config that `subject` means; of a run, with the vocabulary it trains with."""
    found = resolve(subject)
    if isinstance(found, ModelConfig):
        return found
    from glassformer.training.forecast import forecast

    return forecast(found).run.model


def _is_run(subject: object) -> bool:
    module = sys.modules.get("glassformer.training.run")  # a run exists only if this was imported
    return module is not None and isinstance(subject, module.Run)


def _named(subject: "str | os.PathLike[str]", changes: tuple[str, ...]) -> "ModelConfig | Run":
    if isinstance(subject, str) and subject in presets.ALL:
        return presets.get(subject)
    path = Path(subject).expanduser()
    if path.is_file():
        return _read(path, str(subject), changes)
    if path.suffix == ".toml" or not (path.is_dir() or isinstance(subject, str)):
        raise ConfigError(f"{subject} does not exist: give a preset, a model folder or a TOML file.")
    from glassformer.weights import load_config, resolve_unless_preset

    folder = resolve_unless_preset(str(subject))
    if folder is not None:
        return load_config(folder)
    return presets.get(str(subject))  # refuses it, and names presets that are spelled like it


def _read(path: Path, name: str, changes: tuple[str, ...]) -> "ModelConfig | Run":
    """A TOML file: a run file, read exactly as `glass train` reads it, or a model config."""
    try:
        text = path.read_text(encoding="utf-8")
        data: dict[str, Any] = tomllib.loads(text)
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not text: give a TOML file, a model folder or a preset.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not readable TOML: {error}.") from None
    if data and not RUN_KEYS & set(data):
        return from_dict(data)
    from glassformer.training.run import read_run

    return read_run(text, changes, source=name)
