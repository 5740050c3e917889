"""Models that are one file: GGUF, and the checkpoints of nanoGPT."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.weights.errors import WeightsError
from glassformer.weights.formats import nanogpt
from glassformer.weights.formats.gguf.file import is_gguf, open_gguf
from glassformer.weights.formats.gguf.read import read_gguf
from glassformer.weights.formats.gguf.vocabulary import TEMPLATE, named_tokens, read_vocabulary


def is_model_file(path: Path) -> bool:
    """Return True if a file can be a model."""
    return is_gguf(path) or nanogpt.is_checkpoint(path)


def read_file(
    path: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Return config, state dict and notes of a file. `copy` is explained in `convert.read`."""
    return read_gguf(path).read(dtype, device, copy) if is_gguf(path) else nanogpt.read(path, dtype, device, copy)


def config_of_file(path: Path) -> ModelConfig:
    return read_gguf(path).config() if is_gguf(path) else nanogpt.read_config(path)


def tokenizer_of_file(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a file; None if it has none."""
    if not is_gguf(path):
        return None
    try:
        return read_vocabulary(open_gguf(path).metadata)
    except WeightsError as error:
        raise error if str(path) in str(error) else WeightsError(f"{path}: {error}") from None


def chat_template_of_file(path: Path) -> str | None:
    """Return the chat template of a file (Jinja); None if it has none."""
    template = open_gguf(path).metadata.get(TEMPLATE) if is_gguf(path) else None
    return template if isinstance(template, str) else None


def special_tokens_of_file(path: Path) -> dict[str, str]:
    """Return the texts of named tokens of a file, such as `bos_token`."""
    return named_tokens(open_gguf(path).metadata) if is_gguf(path) else {}
