"""Read a GGUF file: its metadata becomes a config.json, and its tensors get the names of a Hugging Face folder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.family import Source
from glassformer.weights.formats.gguf.architectures import Architecture, Name, find
from glassformer.weights.formats.gguf.file import PLAIN, GgufFile, GgufTensor, open_gguf
from glassformer.weights.formats.gguf.layouts import Layout
from glassformer.weights.formats.gguf.rope import FREQUENCIES, recognize_factors
from glassformer.weights.tensors import Stored, Tensors

IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?|blk\.\d+\.rope_freqs\.weight")
"""Frequencies that old files store."""


@dataclass(frozen=True)
class LaidOut:
    """A tensor of a GGUF file in the layout of a Hugging Face folder."""

    tensor: GgufTensor
    layout: Layout
    data: Mapping[str, Any]

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.hf_shape(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_view(self) -> bool:
        return self.tensor.is_view and not self.layout.copies

    def read(self) -> Tensor:
        return self.layout.to_hf(self.tensor.read(), self.data)


def read_gguf(path: Path) -> Source:
    """Return the model of a GGUF file as the contents of a Hugging Face folder."""
    file = open_gguf(path)
    if file.metadata.get("split.count", 0) > 1:
        raise WeightsError(
            f"{path} is one of {file.metadata['split.count']} parts of a model: merge them with llama-gguf-split "
            "--merge."
        )
    try:
        return _source(file)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _source(file: GgufFile) -> Source:
    architecture = find(file.metadata.get("general.architecture"))
    if "token_embd.weight" not in file.tensors:
        raise WeightsError("it has no token_embd.weight, so it is not a language model.")
    data = architecture.config(file.metadata, file.tensors)
    data |= {"vocab_size": file.tensors["token_embd.weight"].shape[0], **special_ids(file.metadata)}
    data["tie_word_embeddings"] = "output.weight" not in file.tensors
    if FREQUENCIES in file.tensors:
        data |= recognize_factors(file.tensors[FREQUENCIES].read(), data)
    stored = _named(file, architecture, data)
    quantised = sorted({t.type for t in file.tensors.values()} - PLAIN.keys())
    notes = [f"{', '.join(quantised)} tensors were dequantised."] if quantised else []
    return Source(data, Tensors(stored, (file.mapped,)), notes=notes)


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens, as config.json has them."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    eos: Any = ends if len(set(ends)) > 1 else next(iter(ends), None)
    return {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["padding"]}


def _named(file: GgufFile, architecture: Architecture, data: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors under the names of a Hugging Face folder; stacked experts become one tensor each."""
    patterns = [(re.compile(re.escape(n.gguf).replace(r"\{i\}", r"(?P<i>\d+)")), n) for n in architecture.names]
    out: dict[str, Stored] = {}
    unknown = []
    for full, tensor in file.tensors.items():
        layer, _, part = full.rpartition(".")
        found = next(((m, name) for regex, name in patterns if (m := regex.fullmatch(layer))), None)
        if full == FREQUENCIES or IGNORED.fullmatch(full):
            continue
        if found is None or part not in ("weight", "bias"):
            unknown.append(f"{full} {list(tensor.shape)}")
            continue
        for name, each in _parts(found[1], found[0].groupdict(), tensor):
            out[f"{name}.{part}"] = LaidOut(each, found[1].layout, data)
    if unknown:
        raise WeightsError(
            f"it has tensors that the architecture {architecture.name} does not have ({summarize(unknown)})."
        )
    return out


def _parts(name: Name, values: dict[str, str], tensor: GgufTensor) -> list[tuple[str, GgufTensor]]:
    if "{j}" not in name.hf:
        return [(name.hf.format(**values), tensor)]
    return [(name.hf.format(**values, j=j), tensor.part(j)) for j in range(tensor.shape[0])]
