"""Read models from folders: Hugging Face (`config.json`) or glassformer (`model.toml`, or `run.toml` of a run)."""

from pathlib import Path

import torch
from torch import Tensor

from glassformer.config import ConfigError, ModelConfig, from_toml
from glassformer.weights import families
from glassformer.weights.convert import IDENTITY, Move, read
from glassformer.weights.errors import PickledError, WeightsError
from glassformer.weights.family import Source
from glassformer.weights.quantized import dequantize
from glassformer.weights.tensors import no_weights, open_folder, read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
TOML, RUN = "model.toml", "run.toml"


def config_of_folder(folder: Path) -> ModelConfig:
    """Return the config of a folder. The names of the tensors are used where config.json is not enough."""
    if (ours := _our_config(folder)) is not None:
        return ours
    try:
        return families.read_config(_source(folder))[1]
    except WeightsError as error:
        raise _at(folder, error) from None


def read_folder(
    folder: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Return config, state dict and notes of a folder. `copy` is explained in `convert.read`."""
    if (config := _our_config(folder)) is not None:
        return _read_ours(folder, config, dtype, device, copy)
    try:
        source = _source(folder, dtype)
        if source.tensors is None:
            raise no_weights(folder)
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
    moves = [Move(name, (name,), IDENTITY, (), True, shape) for name, shape in families.shapes(config).items()]
    try:
        state, notes = read(tensors, moves, (), (), "", dtype, device, copy)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {str(error).replace(CONFIG, TOML)}") from None
    return config, state, notes


def _source(folder: Path, dtype: torch.dtype | None = None) -> Source:
    config, generation = folder / CONFIG, folder / GENERATION
    if not config.exists():
        error = no_weights(folder)
        if isinstance(error, PickledError):
            raise error
        if files := sorted(folder.glob("*.gguf")):
            raise WeightsError(f"{folder} has no {CONFIG}, but GGUF files: give {files[0]}, which is a whole model.")
        raise WeightsError(f"{folder} has neither {CONFIG} nor {TOML}, so it is not a model folder: add one of them.")
    data, tensors = read_json(config), open_folder(folder)
    if data.get("quantization_config") is not None:
        tensors = dequantize(tensors, data, dtype)
        data.pop("quantization_config")
    return Source(data, tensors, read_json(generation) if generation.exists() else {})
