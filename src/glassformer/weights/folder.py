"""Load models from folders: Hugging Face (`config.json`) or glassformer (`model.toml`, or `run.toml` of a run)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer import pretrained
from glassformer.config import ConfigError, ModelConfig, from_toml
from glassformer.model import Model, build
from glassformer.weights import families, hub
from glassformer.weights.convert import IDENTITY, Move, read, shapes
from glassformer.weights.errors import PickledError, WeightsError
from glassformer.weights.family import Source
from glassformer.weights.tensors import no_weights, open_folder, read_json

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOML, RUN = "model.toml", "run.toml"
# Files of a tokenizer in transformers; they are copied from the folder from which a model was loaded.
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Origin:
    """The folder from which a model was loaded, stored as `model.origin`."""

    path: Path
    notes: tuple[str, ...] = field(default=())
    """Notes for the user: dropped tensors, settings that only affect training."""


def resolve(name: str | Path) -> Path:
    """Return the folder of a path, of a bundled model or of a hub name.

    Raises:
        WeightsError: there is no such model.
    """
    path = Path(name).expanduser()
    if path.is_dir() and str(name):  # an empty name would mean the working directory
        return path
    if str(name) in pretrained.FOLDERS and not path.is_file():
        return pretrained.FOLDERS[str(name)]
    return hub.find(name)


def resolve_unless_preset(name: str) -> Path | None:
    """Return the folder that a name means to a command that takes presets too; None if it can only be a preset.

    `gpt2` is then the preset. Folders, bundled models and OWNER/MODEL of the hub mean what they mean to `resolve`.
    """
    is_folder = Path(name).expanduser().is_dir() or name in pretrained.FOLDERS
    return resolve(name) if is_folder or "/" in name else None


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    require_finite: bool = False,
) -> Model:
    """Load the model of a folder, or of a hub name such as `gpt2`, in evaluation mode.

    The default `dtype` is that of the file. The weights exist only once in memory: the model is built on the meta
    device and takes over the tensors that are read. `require_finite` refuses weights that are NaN or infinite, with
    which all results would be NaN or infinite too.

    Raises:
        WeightsError: the folder cannot be loaded. The message is one sentence.
    """
    folder = resolve(path)
    config, state, notes = read_folder(folder, _dtype(dtype), device)
    model = build(config, device="meta")
    model.load_state_dict(state, strict=True, assign=True)
    if require_finite and (problem := non_finite(model)) is not None:
        raise WeightsError(f"{path}: {problem}: copy the weights again, or take an earlier checkpoint.")
    model.origin = Origin(folder, tuple(notes))  # type: ignore[assignment]
    return model.eval()


@torch.no_grad()
def non_finite(model: nn.Module) -> str | None:
    """Return a sentence about the first parameter that contains NaN or infinite values; None if there is none.

    A frozen parameter may contain infinities (a mask), but no NaN.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel():
            continue
        ends = torch.stack(torch.aminmax(parameter.float() if parameter.dtype.itemsize == 1 else parameter))
        if bool((ends.isfinite() if parameter.requires_grad else ~ends.isnan()).all()):
            continue
        wrong = int((~parameter.isfinite() if parameter.requires_grad else parameter.isnan()).sum())
        return f"{wrong:,} of the {parameter.numel():,} numbers in {name} are NaN or infinite"
    return None


def load_to_compute(
    path: str | Path, *, dtype: torch.dtype | str | None = None, device: str | torch.device = "cpu"
) -> Model:
    """Load a model in the dtype it is computed in: a CPU widens weights that are stored in 16 bits to float32.

    Half precisions are for storage and for accelerators. A `dtype` that is given is used.
    """
    model = load(path, dtype=dtype, device=device)
    stored = next(model.parameters()).dtype
    return model.float() if dtype is None and model.device.type == "cpu" and stored.itemsize == 2 else model


def load_config(path: str | Path) -> ModelConfig:
    """Load the config of a folder. The names of the tensors are used where config.json is not enough, if they exist."""
    folder = resolve(path)
    if (ours := _our_config(folder)) is not None:
        return ours
    try:
        return families.read_config(_source(folder))[1]
    except WeightsError as error:
        raise _at(folder, error) from None


def load_tokenizer(path: str | Path) -> Any:
    """Load the `tokenizers.Tokenizer` from `tokenizer.json` of a folder; return None if there is none."""
    file = resolve(path) / TOKENIZER
    if not file.exists():
        return None
    from tokenizers import Tokenizer  # loading a model does not need it

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{file} is not a tokenizer that `tokenizers` can read: {error}.") from None


def read_folder(
    folder: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Return config, state dict and notes of a folder. `copy` is explained in `convert.read`."""
    if (config := _our_config(folder)) is not None:
        return _read_ours(folder, config, dtype, device, copy)
    source = _source(folder)
    if source.tensors is None:
        raise no_weights(folder)
    try:
        config, state = families.from_hf(source, dtype, device, copy)
    except WeightsError as error:
        raise _at(folder, error) from None
    return config, state, source.notes


def _at(folder: Path, error: WeightsError) -> WeightsError:
    return error if str(folder) in str(error) else WeightsError(f"{folder}: {error}")


def _our_config(folder: Path) -> ModelConfig | None:
    for name in (TOML, RUN):
        file = folder / name
        if file.exists():
            try:
                return from_toml(file.read_text(encoding="utf-8"), str(file))
            except ConfigError as error:
                raise WeightsError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from None
            except (OSError, UnicodeDecodeError) as error:
                raise WeightsError(f"{file} cannot be read: {error}.") from None
    return None


def _read_ours(
    folder: Path, config: ModelConfig, dtype: torch.dtype | None, device: str | torch.device, copy: bool
) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Read a glassformer folder. Names are the same on both sides; presence and shape of every tensor are checked."""
    tensors = open_folder(folder)
    if tensors is None:
        raise no_weights(folder)
    moves = [Move(name, (name,), IDENTITY, (), True, shape) for name, shape in shapes(config).items()]
    try:
        state, notes = read(tensors, moves, (), (), "", dtype, device, copy)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {str(error).replace(CONFIG, TOML)}") from None
    return config, state, notes


def _source(folder: Path) -> Source:
    config, generation = folder / CONFIG, folder / GENERATION
    if not config.exists():
        error = no_weights(folder)
        if isinstance(error, PickledError):
            raise error
        raise WeightsError(f"{folder} has neither {CONFIG} nor {TOML}, so it is not a model folder: add one of them.")
    return Source(read_json(config), open_folder(folder), read_json(generation) if generation.exists() else {})


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    known = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise WeightsError(f"dtype={dtype!r} is not known: use one of {', '.join(known)}.")
    return known[dtype]
