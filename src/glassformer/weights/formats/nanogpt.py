"""Read the `ckpt.pt` of nanoGPT: GPT-2's tensors under the same names, with matrices stored (out, in).

The file is a pickle in a zip archive. It is opened with `torch.load(weights_only=True)`, which creates tensors and
plain values and refuses everything else; nothing is added to what it allows. The checkpoint has no tokenizer.
"""

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.config import Attention, ConfigError, DecoderConfig, Dense, LayerNorm, ModelConfig
from glassformer.weights.convert import CONCATENATED, Drop, shapes
from glassformer.weights.convert import plan as plan_moves
from glassformer.weights.convert import read as read_tensors
from glassformer.weights.errors import WeightsError, pickled, summarize
from glassformer.weights.hf.gpt2 import ENDS, MLP, NORMS
from glassformer.weights.hf.layouts import QKV, names
from glassformer.weights.tensors import AGAIN, Tensors

COMPILED = "_orig_mod."
"""Prefix of the names of a model that was saved while it was compiled."""
ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
PREFIX = "transformer."
TABLE, *REST = names({**NORMS, **MLP, QKV: ("attn.c_attn", CONCATENATED), "attention.o": "attn.c_proj"}, **ENDS)
ROWS = (dataclasses.replace(TABLE, aliases=("lm_head.weight",)), *REST)  # the head is always tied
DROPS = (Drop("{p}h.{i}.attn.bias", "the causal mask"),)


class LoadedTensor:
    """A tensor that torch has mapped from the file."""

    is_view = True

    def __init__(self, file: Path, tensor: Tensor):
        self.file, self.shape, self.dtype, self._tensor = file, tuple(tensor.shape), tensor.dtype, tensor

    def read(self) -> Tensor:
        return self._tensor


def is_checkpoint(path: Path) -> bool:
    """Return True if a file may be a checkpoint of nanoGPT: a zip archive with the suffix .pt."""
    return path.suffix.lower() == ".pt" and zipfile.is_zipfile(path)


def read(
    path: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
    """Return config, state dict and notes of a checkpoint."""
    model, config = _open(path)
    moves = plan_moves(ROWS, shapes(config), PREFIX)
    tensors = Tensors({name: LoadedTensor(path, tensor) for name, tensor in model.items()})
    try:
        state, notes = read_tensors(tensors, moves, ROWS, DROPS, PREFIX, dtype, device, copy)
    except WeightsError as error:
        raise WeightsError(f"{path}: {str(error).replace('config.json', 'model_args')}") from None
    return config, state, notes


def read_config(path: Path) -> ModelConfig:
    return _open(path)[1]


def _open(path: Path) -> tuple[dict[str, Tensor], ModelConfig]:
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises RuntimeError for a broken archive and its own error for forbidden names
        raise _refused(path, error) from None
    held = checkpoint if isinstance(checkpoint, dict) else {}
    model, arguments = held.get("model"), held.get("model_args")
    if not isinstance(model, dict) or not isinstance(arguments, dict):
        raise pickled(f"{path} is a pickle")
    tensors = {str(name).removeprefix(COMPILED): tensor for name, tensor in model.items()}
    wrong = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if wrong:
        raise WeightsError(f"{path}: the model holds values that are not tensors ({summarize(wrong)}).")
    try:
        return tensors, _config(arguments)
    except (WeightsError, ConfigError) as error:
        raise WeightsError(f"{path}: {error}") from None


def _refused(path: Path, error: Exception) -> WeightsError:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # not a complete archive
        names = []
    if names:
        return WeightsError(
            f"{path} holds objects that are neither tensors nor plain values ({summarize(names)}), and opening them "
            "can run code: save the checkpoint again without them."
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return WeightsError(f"{path} is a truncated or corrupt checkpoint ({reason.rstrip('.')}): {AGAIN}.")


def _config(arguments: dict[str, Any]) -> DecoderConfig:
    """Return the config of `model_args`. nanoGPT has GELU without the tanh approximation, and a tied head."""
    wrong = [f"{key}={arguments.get(key)!r}" for key in ARGUMENTS if type(arguments.get(key)) is not int]
    bias, dropout = arguments.get("bias", True), arguments.get("dropout", 0.0)
    if type(bias) is not bool or not isinstance(dropout, int | float):
        wrong.append(f"bias={bias!r}, dropout={dropout!r}")
    if wrong:
        raise WeightsError(f"model_args has values that nanoGPT does not write ({summarize(wrong)}).")
    width = arguments["n_embd"]
    return DecoderConfig(
        vocab_size=arguments["vocab_size"],
        d_model=width,
        n_layers=arguments["n_layer"],
        attention=Attention(n_heads=arguments["n_head"], bias=bias),
        feedforward=Dense(d_ff=4 * width, activation="gelu", bias=bias),
        norm=LayerNorm(eps=1e-5, bias=bias),
        max_len=arguments["block_size"],
        dropout=float(dropout),
    )
