"""Load a model, its config, its tokenizer or its chat template from whatever holds it: a folder or a file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.model import Model, build
from glassformer.weights import families, hub
from glassformer.weights.errors import WeightsError
from glassformer.weights.folder import config_of_folder, read_folder
from glassformer.weights.formats import nanogpt
from glassformer.weights.formats.gguf.file import is_gguf, open_gguf
from glassformer.weights.formats.gguf.read import read_gguf
from glassformer.weights.formats.gguf.vocabulary import TEMPLATE, read_vocabulary
from glassformer.weights.tokenizer import read_chat_template, read_tokenizer


@dataclass(frozen=True)
class Origin:
    """The folder or file from which a model was loaded, stored as `model.origin`."""

    path: Path
    notes: tuple[str, ...] = field(default=())
    """Notes for the user: dropped tensors, settings that only affect training."""

    def tokenizer(self) -> Any:
        """Return the `tokenizers.Tokenizer` that belongs to the model; None if there is none."""
        return _tokenizer(self.path)

    def chat_template(self) -> str | None:
        """Return the chat template that belongs to the model (Jinja); None if there is none."""
        return _chat_template(self.path)


def load(path: str | Path, *, dtype: torch.dtype | str | None = None, device: str | torch.device = "cpu") -> Model:
    """Load a model in evaluation mode: a folder, a hub name such as `gpt2`, a GGUF file or a nanoGPT checkpoint.

    The default `dtype` is that of the file; quantised weights become float32, or the dtype that config.json names. The
    weights exist only once in memory: the model is built on the meta device and takes over the tensors that are read.

    Raises:
        WeightsError: the model cannot be loaded. The message is one sentence.
    """
    place = hub.resolve(path)
    config, state, notes = read_model(place, _dtype(dtype), device)
    model = build(config, device="meta")
    model.load_state_dict(state, strict=True, assign=True)
    model.origin = Origin(place, tuple(notes))  # type: ignore[assignment]
    return model.eval()


def read_model(
    place: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Return config, state dict and notes of a folder or file. `copy` is explained in `convert.read`."""
    if place.is_dir():
        return read_folder(place, dtype, device, copy)
    if not is_gguf(place):
        return nanogpt.read(place, dtype, device, copy)
    source = read_gguf(place)
    try:
        config, state = families.from_hf(source, dtype, device, copy)
    except WeightsError as error:
        raise WeightsError(f"{place}: {str(error).replace('config.json', 'its metadata')}") from None
    return config, state, source.notes


def load_config(path: str | Path) -> ModelConfig:
    """Load the config of a folder or file. The names of the tensors are used where the config is not enough."""
    place = hub.resolve(path)
    if place.is_dir():
        return config_of_folder(place)
    return families.read_config(read_gguf(place))[1] if is_gguf(place) else nanogpt.read_config(place)


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a folder or file as a `tokenizers.Tokenizer`; return None if there is none.

    Raises:
        WeightsError: the file cannot be read, or the tokenizer belongs to another model.
    """
    return _tokenizer(hub.resolve(path))


def load_chat_template(path: str | Path) -> str | None:
    """Load the chat template of a folder or file (Jinja); return None if there is none."""
    return _chat_template(hub.resolve(path))


def _tokenizer(place: Path) -> Any:
    if place.is_dir():
        return read_tokenizer(place)
    if not is_gguf(place):
        return None
    try:
        return read_vocabulary(open_gguf(place).metadata)
    except WeightsError as error:
        raise WeightsError(f"{place}: {error}") from None


def _chat_template(place: Path) -> str | None:
    if place.is_dir():
        return read_chat_template(place)
    template = open_gguf(place).metadata.get(TEMPLATE) if is_gguf(place) else None
    return template if isinstance(template, str) else None


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    known = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise WeightsError(f"dtype={dtype!r} is not known: use one of {', '.join(known)}.")
    return known[dtype]
