"""Models into folders: written beside, read back and compared bit for bit, then put in place in one step."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from glassformer.config import ModelConfig, to_dict, to_toml
from glassformer.weights import families
from glassformer.weights.errors import WeightsError, some
from glassformer.weights.folder import CONFIG, GENERATION, RUN, TOKENIZER, TOML, Origin, read_folder
from glassformer.weights.swap import staged
from glassformer.weights.tensors import INDEX, SINGLE

# Beside tokenizer.json, transformers wants these; they are copied as they are from the folder a model was loaded from.
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
)


def save(
    model: nn.Module,
    path: str | Path,
    format: str = "hf",
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a model as a Hugging Face folder (`hf`) or as ours (`glass`); returns the folder.

    `tokenizer` is a `tokenizers.Tokenizer` or the path of a tokenizer.json; None takes along the one the model came
    with. Files larger than `max_shard_bytes` are split. The dtype is kept. An existing model folder is replaced whole,
    its other files kept; a folder of anything else is refused. Done means: read back from disk and found equal.
    """
    if format not in ("hf", "glass"):
        raise WeightsError(f"format={format!r} is not known: use 'hf' (Hugging Face) or 'glass' (ours).")
    if max_shard_bytes < 1:
        raise WeightsError(f"max_shard_bytes={max_shard_bytes} must be at least 1.")
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise WeightsError(f"a {type(model).__name__} has no glassformer config: only models built here can be saved.")
    target = free_target(path)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if format == "hf":
        data, tensors = families.to_hf(config, state)
    else:
        data, tensors = {}, state
    with staged(target, keep=_is_not_model_file) as stage:
        if format == "hf":
            data |= {"dtype": _dtype_name(state), "torch_dtype": _dtype_name(state)}
            _write_json(stage / CONFIG, data)
            _write_generation(stage / GENERATION, data)
        else:
            (stage / TOML).write_text(to_toml(to_dict(config)), encoding="utf-8")
        _write_tensors(stage, tensors, max_shard_bytes)
        _write_tokenizer(stage, model, tokenizer)
        _compare(stage, config, state)
    return target


def free_target(path: str | Path) -> Path:
    """Where a model may be saved: what is there must be a model, or nothing."""
    target = Path(path).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise WeightsError(f"{target} is a file: a model is saved as a folder, give another path.")
    if target.exists() and any(target.iterdir()) and not any((target / n).exists() for n in (CONFIG, TOML, RUN)):
        raise WeightsError(
            f"{target} is not empty and not a model folder (no {CONFIG} or {TOML} in it): it is not overwritten, give "
            "another path."
        )
    return target


def _is_not_model_file(name: str) -> bool:
    """Other files of a folder (a README, a tokenizer, a run) survive a new save."""
    if name in (CONFIG, GENERATION, TOML, SINGLE, INDEX):
        return False
    return not (name.startswith("model-") and name.endswith(".safetensors"))


def _dtype_name(state: Mapping[str, Tensor]) -> str:
    sizes: dict[torch.dtype, int] = {}
    for tensor in state.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_generation(path: Path, data: dict[str, Any]) -> None:
    """transformers' generate() reads its ids from here."""
    ids = {key: value for key, value in data.items() if key.endswith("_token_id") and value is not None}
    if ids:
        _write_json(path, ids)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], limit: int) -> None:
    shards = split(tensors, limit)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise WeightsError(f"{folder.parent}: {name} could not be written ({error}).") from None
        os.chmod(folder / name, (folder / name).stat().st_mode | 0o600)
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})


def split(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """In the order given, a new shard when the next tensor would pass `limit` bytes; a larger one stands alone."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if shards[-1] and size + bytes_ > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += bytes_
    return shards


def _write_tokenizer(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    if isinstance(tokenizer, str | Path):
        file = Path(tokenizer).expanduser()
        file = file / TOKENIZER if file.is_dir() else file
        if not file.is_file():
            raise WeightsError(f"the tokenizer {file} does not exist: give the path of a {TOKENIZER}.")
        shutil.copyfile(file, folder / TOKENIZER)
    elif tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZER))
    elif isinstance(origin := getattr(model, "origin", None), Origin):
        for name in TOKENIZER_FILES:
            if (origin.path / name).is_file():
                shutil.copyfile(origin.path / name, folder / name)


def _compare(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Read the folder back and find every tensor as it was, bit for bit, and the same arithmetic."""
    back, read, _ = read_folder(folder, copy=False)
    added = [name for name in read if name not in state]
    wrong = [
        name for name in state if name not in read or not _equal_bits(state[name].to(read[name].dtype), read[name])
    ]
    wrong += [name for name in added if read[name].any()]  # biases that a family always has are written as zeros
    if wrong:
        raise WeightsError(f"the saved model reads back differently ({some(wrong)}): nothing was replaced.")
    if not added and (field := families.difference(config, back)):
        raise WeightsError(f"the saved config reads back with another {field}: nothing was replaced.")


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bytes: unlike ==, also for NaN and for the sign of zero."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
