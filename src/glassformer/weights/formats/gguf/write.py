"""Write a model as a GGUF file: metadata, tokenizer, and tensors in the chosen quantisation."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.weights import families
from glassformer.weights.convert import IDENTITY, Move, plan
from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.family import Source
from glassformer.weights.formats.gguf.architecture import EXACT, Architecture
from glassformer.weights.formats.gguf.architectures import TYPES, for_type
from glassformer.weights.formats.gguf.file import library, open_gguf
from glassformer.weights.formats.gguf.rope import FREQUENCIES, frequency_factors
from glassformer.weights.formats.gguf.vocabulary import Vocabulary

Quantization = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
"""Every quantisation that can be written: those that the package gguf computes and llama.cpp multiplies with."""
DTYPES: dict[torch.dtype, Quantization] = {torch.float16: "f16", torch.bfloat16: "bf16"}
SMALL = ("q5_1", "q5_0", "q4_1", "q4_0")
"""Quantisations with which the output matrix, the most sensitive one, is written as q8_0."""
FILE_TYPES = {"f32": "ALL_F32"}


class RefusedError(WeightsError):
    """llama.cpp has an architecture for a type of this model, but computes something else."""


@dataclass(frozen=True)
class GgufModel:
    """A model in the form of a GGUF file: what is written, before it is quantised."""

    config: ModelConfig
    architecture: Architecture
    moves: dict[str, Move]
    """How the state dict gives each GGUF tensor, by its name."""
    state: dict[str, Tensor]
    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()

    def tensor(self, name: str) -> Tensor:
        """Return the values of a GGUF tensor."""
        move = self.moves[name]
        return move.transform.theirs([self.state[part] for part in move.ours])


def describe(config: ModelConfig, state: Mapping[str, Tensor]) -> GgufModel:
    """Return the model as GGUF has it.

    Raises:
        WeightsError: llama.cpp cannot compute this model. The message names the field.
    """
    if config.head is None:
        raise WeightsError("a model without a head cannot be written as GGUF: llama.cpp needs one to compute logits.")
    config, data, notes = _fitted(config, state)
    architecture = for_type(data["model_type"])
    metadata = architecture.metadata(data)
    metadata[f"{architecture.name}.vocab_size"] = config.vocab_size
    held = families.with_biases(families.read_config(Source(dict(data), None))[1], state)
    moves = _moves(architecture, config, held)
    factors = frequency_factors(data)
    if factors is not None:
        held[FREQUENCIES], shape = factors, tuple(factors.shape)
        moves[FREQUENCIES] = Move(FREQUENCIES, (FREQUENCIES,), IDENTITY, (), True, shape, (shape,))
    return GgufModel(config, architecture, moves, held, metadata, notes)


def config_json(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the config.json of a model: of the first type whose architecture in llama.cpp computes the model."""
    types, refused = set(TYPES), None
    while types:
        try:
            data = families.config_json(config, state, among=types)
        except WeightsError:
            break
        try:
            for_type(data["model_type"]).metadata(data)
        except WeightsError as error:
            refused = refused or error
            types.remove(data["model_type"])
        else:
            return data
    if refused is not None:
        raise RefusedError(str(refused))
    return families.config_json(config, state)


def _fitted(config: ModelConfig, state: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Any], tuple[str, ...]]:
    """Return config, config.json and notes; without the windows if no architecture computes the model with them."""
    refused = None
    try:
        data = config_json(config, state)
        if config.attention.window is None or for_type(data["model_type"]).windows is not None:
            return config, data, ()
    except RefusedError as error:
        if config.attention.window is None:
            raise
        refused = error
    fitted, notes = _without_window(config)
    try:
        return fitted, config_json(fitted, state), notes
    except WeightsError as error:
        raise refused or error from None


def _moves(architecture: Architecture, config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Move]:
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    moves = plan(architecture.rows(config), shapes, "", strict=False)
    used = {name for move in moves for name in move.ours}
    if unknown := [name for name in state if name not in used]:
        raise WeightsError(
            f"tensors that llama.cpp's architecture {architecture.name} does not have cannot be written as GGUF "
            f"({summarize(unknown)}): use --to hf or --to glass."
        )
    return {move.theirs: move for move in moves}


def _without_window(config: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the config without a sliding window, for a context that is not longer than the window.

    The architectures here have no windows in llama.cpp. Up to W tokens, a window of W changes nothing.
    """
    window = config.attention.window
    if window is None:
        return config, ()
    attention = dataclasses.replace(config.attention, window=None, window_layers=None)
    longest = min(window, config.max_len or window)
    note = (
        f"llama.cpp computes this architecture without its window of {window} tokens: the context of the file is "
        f"limited to {longest} tokens, where both are equal."
    )
    return dataclasses.replace(config, attention=attention, max_len=longest), (note,)


def write_gguf(
    model: GgufModel, path: Path, quantization: Quantization, vocabulary: Vocabulary, name: str
) -> dict[str, str]:
    """Write a GGUF file, and return the type of each tensor in it."""
    has_output = "output.weight" in model.moves
    file_type = FILE_TYPES.get(quantization, f"MOSTLY_{quantization.upper()}")

    def kind_of(full: str, shape: tuple[int, ...], exact: bool) -> str:
        return _type(full, shape, exact, quantization, has_output)

    return write_tensors(model, path, kind_of, vocabulary, name, file_type)


def write_tensors(
    model: GgufModel,
    path: Path,
    kind_of: Callable[[str, tuple[int, ...], bool], str],
    vocabulary: Vocabulary,
    name: str,
    file_type: str | None = None,
) -> dict[str, str]:
    """Write a GGUF file whose tensors have the types `kind_of(name, shape, exact)`, which are returned."""
    gguf = library()
    writer = gguf.GGUFWriter(path, model.architecture.name)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if file_type is not None:
        writer.add_file_type(int(gguf.LlamaFileType[file_type]))
    for key, value in {**model.metadata, **vocabulary.metadata}.items():
        _add(writer, key, value)
    types = {}
    for full, move in model.moves.items():
        shape = move.shape
        types[full] = kind = kind_of(full, shape, full.endswith(EXACT))
        quant = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            dtype = np.dtype(np.float32 if kind == "F32" else np.float16)
        else:
            dtype, shape = np.dtype(np.uint8), gguf.quants.quant_shape_to_byte_shape(shape, quant)
        size = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(full, shape, dtype, size, raw_dtype=quant)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for full, kind in types.items():
            writer.write_tensor_data(_quantize(full, model.tensor(full), kind))
    finally:
        writer.close()
    return types


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a value of the metadata with the type that llama.cpp expects."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _type(full: str, shape: tuple[int, ...], exact: bool, quantization: Quantization, has_output: bool) -> str:
    """Return the type of a tensor. Vectors and tensors that must stay exact are float32, as in llama.cpp."""
    gguf = library()
    if len(shape) == 1 or exact:
        return "F32"
    if quantization in SMALL and full == ("output.weight" if has_output else "token_embd.weight"):
        quantization = "q8_0"
    kind = quantization.upper()
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return kind if shape[-1] % block == 0 else "F16"


def _quantize(full: str, tensor: Tensor, kind: str) -> np.ndarray:
    gguf = library()
    values = tensor.detach().float().cpu().contiguous()
    if kind == "F16" and not bool(values.half().isfinite().all()) and bool(values.isfinite().all()):
        raise WeightsError(
            f"{full} has values beyond {torch.finfo(torch.float16).max:g}, the largest of f16: use bf16 or f32."
        )
    return gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])


def compare_file(path: Path, model: GgufModel, types: Mapping[str, str]) -> None:
    """Read a file back and compare every tensor with the model, rounded as the file rounds it."""
    gguf, wrong, file = library(), [], open_gguf(path)
    for full, kind in types.items():
        kept = gguf.quants.dequantize(_quantize(full, model.tensor(full), kind), gguf.GGMLQuantizationType[kind])
        back = file.tensors[full].read().float().contiguous()
        if not torch.equal(torch.from_numpy(kept).view(torch.int32), back.view(torch.int32)):
            wrong.append(full)
    if wrong:
        raise WeightsError(f"the GGUF file reads back differently ({summarize(wrong)}): nothing was replaced.")


def check_quantization(quantization: str) -> None:
    if quantization not in get_args(Quantization):
        raise WeightsError(
            f"quantization={quantization!r} is not known: use one of {', '.join(get_args(Quantization))}."
        )
