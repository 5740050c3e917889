"""Save models: a folder is written next to its target, read back, compared bit for bit, then renamed in one step."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from glassformer.config import ModelConfig, to_dict, to_toml
from glassformer.finding import Finding
from glassformer.model.adapters import merged_state
from glassformer.weights import families
from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.folder import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_FILES,
    TOML,
    Origin,
    load_tokenizer,
    read_folder,
)
from glassformer.weights.swap import staged
from glassformer.weights.target import check_target
from glassformer.weights.tensors import INDEX, SINGLE


def save(
    model: nn.Module,
    path: str | Path,
    format: str = "hf",
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    quantization: str | None = None,
) -> Path:
    """Save a model and return its path.

    Formats: `hf` is a Hugging Face folder, `glass` a glassformer folder, `gguf` a file for llama.cpp, `onnx` a folder
    for onnxruntime, and `peft` the adapter alone of a model that was loaded with one. `quantization` is for GGUF: f32,
    f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0. Default: the dtype of the weights.

    `tokenizer` is a `tokenizers.Tokenizer` or the path of a tokenizer.json. Default: the tokenizer the model was loaded
    with. Weights of folders larger than `max_shard_bytes` are split into shards. The dtype is kept, and missing parent
    folders are created.

    A folder that holds a model is replaced only with `overwrite=True`, and then as a whole: none of its files are
    kept. Files, symbolic links, training runs and folders with anything else in them are never replaced. The new
    folder is written next to `path`, read back, compared bit for bit, and only then renamed. A GGUF file is also run by
    llama.cpp if llama-cpp-python is installed, and an ONNX model by onnxruntime.

    >>> folder = gf.save(gf.build(gf.presets.nano(vocab_size=65)), "my-model")
    >>> gf.load(folder).config.vocab_size
    65
    """
    if quantization is not None and format != "gguf":
        raise WeightsError(f"quantization={quantization!r} is for format='gguf': leave it out.")
    if format == "gguf":
        return write_gguf_file(model, path, quantization, tokenizer, overwrite)[0]
    if format == "onnx":
        return write_onnx_folder(model, path, tokenizer, overwrite)[0]
    if format == "peft":
        from glassformer.weights.formats.adapter import save_peft

        return save_peft(model, path, overwrite)
    return write_folder(model, path, format, tokenizer, max_shard_bytes, overwrite)


def write_gguf_file(
    model: nn.Module, path: str | Path, quantization: str | None, tokenizer: Any = None, overwrite: bool = False
) -> tuple[Path, list[Finding], list[str]]:
    """Save a model as a GGUF file; return its path, what was verified, and notes."""
    from glassformer.weights.formats.gguf.save import save_gguf

    config, state = parts_of(model)
    origin = getattr(model, "origin", None)
    template = origin.chat_template() if isinstance(origin, Origin) and tokenizer is None else None
    return save_gguf(path, config, state, _tokenizer(model, tokenizer), template, quantization, overwrite)


def write_onnx_folder(
    model: nn.Module, path: str | Path, tokenizer: Any = None, overwrite: bool = False
) -> tuple[Path, list[Finding], list[str]]:
    """Save a model as an ONNX folder; return its path, what was verified, and notes."""
    from glassformer.weights.formats.onnx.save import save_onnx

    config, state = parts_of(model)

    def write_rest(folder: Path) -> None:
        try:
            data, _ = families.to_hf(config, state)
        except WeightsError:  # no family has this model; its ONNX graph needs none
            (folder / TOML).write_text(to_toml(to_dict(config)), encoding="utf-8")
        else:
            _write_json(folder / CONFIG, data)
            _write_generation(folder / GENERATION, data)
        _write_tokenizer(folder, model, tokenizer)

    return save_onnx(model, path, overwrite, write_rest)


def parts_of(model: nn.Module) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the config and the state dict of a glassformer model."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise WeightsError(f"a {type(model).__name__} has no glassformer config: only glassformer models can be saved.")
    state = merged_state(model)  # adapters that are still separate become part of the weights
    return config, {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _tokenizer(model: nn.Module, tokenizer: Any) -> Any:
    """Return the tokenizer that was given, or the one the model was loaded with."""
    if isinstance(tokenizer, str | Path):
        file = Path(tokenizer).expanduser()
        file = file if file.is_dir() else file.parent
        return load_tokenizer(file)
    origin = getattr(model, "origin", None)
    return origin.tokenizer() if tokenizer is None and isinstance(origin, Origin) else tokenizer


def write_folder(
    model: nn.Module,
    path: str | Path,
    format: str = "hf",
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Save a model as `save` does, and call `check` with the complete new folder before it is renamed.

    If `check` raises an error, the target is left unchanged.
    """
    if format not in ("hf", "glass"):
        raise WeightsError(f"format={format!r} is not known: use 'hf', 'glass', 'gguf', 'onnx' or 'peft'.")
    if max_shard_bytes < 1:
        raise WeightsError(f"max_shard_bytes={max_shard_bytes} must be at least 1.")
    config, state = parts_of(model)
    target = check_target(path, overwrite)
    if format == "hf":
        origin = getattr(model, "origin", None)
        data, tensors = families.to_hf(config, state, origin.family if isinstance(origin, Origin) else "")
    else:
        data, tensors = {}, state
    with staged(target, overwrite) as stage:
        if format == "hf":
            data |= {"dtype": _dtype_name(state), "torch_dtype": _dtype_name(state)}
            _write_json(stage / CONFIG, data)
            _write_generation(stage / GENERATION, data)
        else:
            (stage / TOML).write_text(to_toml(to_dict(config)), encoding="utf-8")
        _write_tensors(stage, tensors, max_shard_bytes)
        _write_tokenizer(stage, model, tokenizer)
        _compare(stage, config, state)
        if check is not None:
            check(stage)
        check_target(target, overwrite)  # again: files may have appeared there in the meantime
    return target


def _dtype_name(state: Mapping[str, Tensor]) -> str:
    sizes: dict[torch.dtype, int] = {}
    for tensor in state.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_generation(path: Path, data: dict[str, Any]) -> None:
    """Write generation_config.json, from which generate() of transformers reads the special token ids."""
    names = ("_token_id", "bad_words_ids")
    ids = {key: value for key, value in data.items() if key.endswith(names) and value is not None}
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
        except SafetensorError as error:  # the library's error for a full disk and everything else
            found = re.search(r"os error (\d+)", str(error))
            raise OSError(
                *((int(found[1]), os.strerror(int(found[1]))) if found else (errno.EIO, str(error)))
            ) from None
        os.chmod(folder / name, (folder / name).stat().st_mode | 0o600)
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})


def split(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split tensors into shards of at most `limit` bytes, in the order given. A larger tensor gets its own shard."""
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
        (folder / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    elif isinstance(origin := getattr(model, "origin", None), Origin):
        if origin.path.is_dir():
            for name in TOKENIZER_FILES:
                if (origin.path / name).is_file():
                    shutil.copyfile(origin.path / name, folder / name)
            return
        if (found := origin.tokenizer()) is not None:
            (folder / TOKENIZER).write_text(found.to_str(pretty=True), encoding="utf-8")
        if (template := origin.chat_template()) is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _compare(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Read the folder back and check that every tensor is equal bit for bit and that the config computes the same."""
    back, read, _ = read_folder(folder, copy=False)
    added = [name for name in read if name not in state]
    wrong = [
        name for name in state if name not in read or not _equal_bits(state[name].to(read[name].dtype), read[name])
    ]
    wrong += [name for name in added if read[name].any()]  # biases that a family always has are written as zeros
    if wrong:
        raise WeightsError(f"the saved model reads back differently ({summarize(wrong)}): nothing was replaced.")
    if not added and (field := families.difference(config, back)):
        raise WeightsError(f"the saved config reads back with a different {field}: nothing was replaced.")


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if the bytes are equal. Unlike ==, this compares NaNs and the sign of zero."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
