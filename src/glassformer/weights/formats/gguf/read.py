"""Read a GGUF file: `families` makes a config of its metadata, written as a config.json; its tensors get our names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.weights import convert, families
from glassformer.weights.convert import Drop
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.formats.gguf.architecture import LATER_LAYERS, Architecture
from glassformer.weights.formats.gguf.architectures import find
from glassformer.weights.formats.gguf.file import PLAIN, GgufFile, open_gguf
from glassformer.weights.formats.gguf.rope import FREQUENCIES, recognize_factors
from glassformer.weights.tensors import Tensors

DROPS = tuple(
    Drop(name, "frequencies, of which the config has the parameters")
    for name in (FREQUENCIES, "blk.{i}.attn_rot_embd", "blk.{i}.attn_rot_embd.weight", "blk.{i}.rope_freqs.weight")
)
LATER = Drop("blk.{i}.{rest}", "a layer that predicts several tokens at once", notice=True, beyond=True)
VECTOR = "ffn_gate_inp_shexp.weight"
"""A vector that converters also write as a matrix of one row, which llama.cpp takes for the same."""


@dataclass(frozen=True)
class GgufSource:
    """The contents of a GGUF file."""

    path: Path
    architecture: Architecture
    data: dict[str, Any]
    """The metadata as a config.json."""
    tensors: Tensors
    drops: tuple[Drop, ...]
    notes: list[str]

    def config(self) -> ModelConfig:
        try:
            _, config = families.read_config(Source(dict(self.data), None))
            families.check_sizes(config, self.tensors, "token_embd.weight")
        except WeightsError as error:
            raise self._refused(error) from None
        return config

    def read(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
    ) -> tuple[ModelConfig, dict[str, Tensor], list[str]]:
        """Return config, state dict and notes."""
        config = self.config()
        rows = self.architecture.rows(config)
        try:
            moves = convert.plan(rows, convert.shapes(config), "")
            state, notes = convert.read(self.tensors, moves, rows, self.drops, "", dtype, device, copy)
        except WeightsError as error:
            raise self._refused(error) from None
        return config, state, [*self.notes, *notes]

    def _refused(self, error: WeightsError) -> WeightsError:
        return WeightsError(f"{self.path}: {str(error).replace('config.json', 'its metadata')}")


def read_gguf(path: Path) -> GgufSource:
    """Return the contents of a GGUF file. No tensor is read yet."""
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


def _source(file: GgufFile) -> GgufSource:
    architecture = find(file.metadata.get("general.architecture"))
    if "token_embd.weight" not in file.tensors:
        raise WeightsError("it has no token_embd.weight, so it is not a language model.")
    data = architecture.config(file.metadata, file.tensors)
    data |= {"vocab_size": file.tensors["token_embd.weight"].shape[0], **special_ids(file.metadata)}
    data["tie_word_embeddings"] = "output.weight" not in file.tensors
    if FREQUENCIES in file.tensors:
        data |= recognize_factors(file.tensors[FREQUENCIES].read(), data)
    quantised = sorted({t.type for t in file.tensors.values()} - PLAIN.keys())
    notes = [f"{', '.join(quantised)} tensors were dequantised."] if quantised else []
    has_later = bool(file.metadata.get(f"{architecture.name}.{LATER_LAYERS}"))
    rows = {n: t for n, t in file.tensors.items() if n.endswith(VECTOR) and len(t.shape) == 2 and t.shape[0] == 1}
    tensors = file.tensors | {name: replace(row, shape=row.shape[1:]) for name, row in rows.items()}
    drops = (*DROPS, LATER) if has_later else DROPS
    return GgufSource(file.path, architecture, data, Tensors(tensors, (file.mapped,)), drops, notes)


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens, as config.json has them."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    eos: Any = ends if len(set(ends)) > 1 else next(iter(ends), None)
    return {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["padding"]}
