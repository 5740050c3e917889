"""Adapters in the folder format of peft: `adapter_config.json` and `adapter_model.safetensors`.

A tensor is named `base_model.model.` + the path of the module in transformers + `.lora_A.weight` (R, in),
`.lora_B.weight` (out, R) or `.lora_magnitude_vector` (out). A and B have this orientation also where the matrix itself
is stored transposed (GPT-2).

Where one matrix of transformers holds several of ours (q, k and v), the rows of B are divided and A is shared. In the
other direction, adapters with different A are stacked: rank 3R, with B block-diagonal.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.model import build
from glassformer.model.adapters import Adapter, adaptable, scale_of
from glassformer.weights import families
from glassformer.weights.convert import Concatenated, Conv1D, Identity, Move, PerHead, Shape
from glassformer.weights.errors import WeightsError, pickled, summarize
from glassformer.weights.tensors import read_json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
HASH = "base_sha256"
"""Key in the metadata of the tensor file: the hash of the weights that the adapter was trained with."""

USED = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "alpha_pattern", "modules_to_save")
IRRELEVANT = (
    # chosen modules and ranks are visible in the tensors; the layout of the matrices is that of the family
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "fan_in_fan_out"),
    *(BASE, "revision", "task_type", "auto_mapping", "peft_version", "inference_mode"),
    *("lora_dropout", "runtime_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of init_lora_weights
)
ALLOWED: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
"""Keys whose other values change what is computed."""
NOTHING: tuple[Any, ...] = (None, False, {}, [], "")
"""Values that switch an unknown key off."""


@dataclass(frozen=True)
class Contents:
    """What a peft folder holds, in our names."""

    layers: dict[str, Adapter]
    replaced: dict[str, Tensor]
    """Whole tensors that replace those of the model (`modules_to_save`)."""
    sha256: str = ""


@dataclass(frozen=True)
class Module:
    """A linear module of transformers and the layers of ours that it holds."""

    path: str
    layers: tuple[str, ...]
    move: Move

    def split(self, rows: Tensor) -> list[Tensor]:
        """Return the rows (out, R), or values (out), of each layer."""
        parts: list[Shape] = [(shape[0], *rows.shape[1:]) for shape in self.move.parts]
        stored = rows.t() if isinstance(self.move.transform, Conv1D) and rows.dim() == 2 else rows
        return [part.contiguous() for part in self.move.transform.ours(stored, parts)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the inverse of `split`."""
        whole = self.move.transform.theirs(parts)
        return (whole.t() if isinstance(self.move.transform, Conv1D) and whole.dim() == 2 else whole).contiguous()


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json. Refuse keys whose values change what is computed in a way that is not implemented."""
    data = read_json(folder / CONFIG)
    if data.get("peft_type") != "LORA":
        raise WeightsError(f"{folder / CONFIG} has peft_type={data.get('peft_type')!r}: only LORA is supported.")
    for key, value in data.items():
        if key in ALLOWED:
            if value is not None and not any(value is one or value == one for one in ALLOWED[key]):
                raise WeightsError(f"{folder / CONFIG} has {key}={value!r}: only {ALLOWED[key][0]!r} is supported.")
        elif key not in (*USED, *IRRELEVANT) and value not in NOTHING:
            raise WeightsError(f"{folder / CONFIG} has {key}={value!r}, which is not supported: leave it out.")
    for key, kind in (("r", int), ("lora_alpha", (int, float))):
        if not isinstance(data.get(key), kind) or isinstance(data.get(key), bool) or data[key] <= 0:
            raise WeightsError(f"{folder / CONFIG} has {key}={data.get(key)!r}, which must be a positive number.")
    return data


def modules_of(config: ModelConfig, family: str) -> tuple[dict[str, Module], dict[str, Move]]:
    """Return the linear modules of transformers that can have an adapter, and all tensors, by their names there."""
    linear = adaptable(build(config, device="meta"))
    found, moves = families.moves_to_hf(config, family)
    modules: dict[str, Module] = {}
    tensors: dict[str, Move] = {}
    for move in moves:
        layers = tuple(name.removesuffix(".weight") for name in move.ours)
        for bare in dict.fromkeys((move.theirs, move.theirs.removeprefix(found.prefix))):  # saved from a base model
            tensors.setdefault(bare, move)
            path = bare.removesuffix(".weight")
            if path != bare and all(name in linear for name in layers):
                modules.setdefault(path, Module(path, layers, move))
    return modules, tensors


def read_peft(folder: Path, config: ModelConfig, family: str) -> Contents:
    """Return the adapters of a peft folder for a model of this config. Every tensor is used or refused."""
    data = read_config(folder)
    stored, sha256 = _read_tensors(folder)
    try:
        modules, tensors = modules_of(config, family)
    except WeightsError as error:  # no family of transformers, so no names that the tensors could have
        raise _other_base(folder, str(error).partition(":")[0]) from None
    layers: dict[str, Adapter] = {}
    used: set[str] = set()
    for name in [name for name in stored if name.endswith(A)]:
        path = name.removeprefix(PREFIX).removesuffix(A)
        module = _module(folder, path, modules)
        values = [stored.get(PREFIX + path + part) for part in (A, B, MAGNITUDE)]
        used |= {PREFIX + path + part for part in (A, B, MAGNITUDE)}
        layers |= _read_module(folder, module, data, values)
    replaced: dict[str, Tensor] = {}
    for name in sorted(set(stored) - used):
        move = tensors.get(name.removeprefix(PREFIX)) if data.get("modules_to_save") else None
        if move is None:
            raise WeightsError(f"{folder} has {name}{list(stored[name].shape)}, {_why(name, config)}.")
        parts = move.transform.ours(stored[name], list(move.parts))
        if any(tuple(part.shape) != shape for part, shape in zip(parts, move.parts, strict=True)):
            raise _other_base(folder, f"{name} is {list(stored[name].shape)}, expected {list(move.shape)}")
        replaced |= dict(zip(move.ours, (part.contiguous() for part in parts), strict=True))
    if not layers:
        raise WeightsError(f"{folder / TENSORS} has no adapter (no name ends with {A}): give another folder.")
    return Contents(layers, replaced, sha256)


def _why(name: str, config: ModelConfig) -> str:
    """Return why a tensor of an adapter cannot be used."""
    if "lora_embedding" in name or "trainable_tokens" in name:
        return "an adapter of an embedding, which is not supported"
    if "experts" in name:
        return "an adapter of experts, which is not supported"
    if name.endswith("lm_head.weight") and config.head is not None and config.head.tied:
        return "but the head of this model is tied to its token table: untie it before training it"
    if ".base_layer." in name:
        return "a copy of a matrix of the base model, which is not supported"
    return "which this model does not have: the adapter belongs to another model, or is of a kind that is not supported"


def _module(folder: Path, path: str, modules: Mapping[str, Module]) -> Module:
    module = modules.get(path)
    if module is not None and not isinstance(module.move.transform, Identity | Conv1D | Concatenated | PerHead):
        raise WeightsError(f"{folder} adapts {path}, whose layout in this family is not supported.")
    if module is not None:
        return module
    if "experts" in path:
        raise WeightsError(f"{folder} adapts {path}: adapters of experts are not supported.")
    if path.endswith(("lm_head", "embed_out")):
        raise WeightsError(f"{folder} adapts the output head {path}, which is not supported: merge it with peft first.")
    raise _other_base(folder, f"there is no linear layer {path} in it")


def _other_base(folder: Path, reason: str) -> WeightsError:
    return other_base(folder, reason, read_json(folder / CONFIG).get(BASE))


def other_base(folder: Path, reason: str, base: object) -> WeightsError:
    """Return the error of an adapter that does not fit the model; `base` is the model that its folder names."""
    named = f"{base}, the base that its folder names" if base else "the model that it was trained on"
    return WeightsError(
        f"the adapter {folder} does not fit this model ({reason}): it belongs to another model, so give {named}."
    )


def _read_module(
    folder: Path, module: Module, data: Mapping[str, Any], values: list[Tensor | None]
) -> dict[str, Adapter]:
    a, b, magnitude = values
    out, inputs = sum(shape[0] for shape in module.move.parts), module.move.parts[0][1]
    rank = len(a) if a is not None else 0
    found = [None if tensor is None else list(tensor.shape) for tensor in values]
    wanted = [[rank, inputs], [out, rank], [out] if data.get("use_dora") else None]
    if found != wanted or a is None or b is None:
        raise _other_base(folder, f"A, B and magnitude of {module.path} are {found}, expected {wanted}")
    alpha = float(data["lora_alpha"])
    for pattern, value in (data.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module.path):
            alpha = float(value)
            break
    stabilised = bool(data.get("use_rslora"))
    scale = scale_of(rank, alpha, stabilised)
    rows = module.split(b)
    norms = [None] * len(rows) if magnitude is None else module.split(magnitude)
    return {
        name: Adapter(a, part, scale, norm, stabilised)
        for name, part, norm in zip(module.layers, rows, norms, strict=True)
    }


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of an adapter, widened to float32, and the hash of its base if the file names one."""
    file = folder / TENSORS
    if not file.exists():
        if (folder / "adapter_model.bin").exists():
            raise pickled(f"{folder} holds its adapter as adapter_model.bin, a pickle")
        raise WeightsError(f"{folder} has no {TENSORS}: it is not a complete adapter folder.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise WeightsError(f"{file} cannot be read ({error}): copy it again.") from None
    wrong = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if wrong:
        raise WeightsError(f"{file} has tensors that are not weights ({summarize(wrong)}).")
    named = {name.removesuffix(".weight") if MAGNITUDE in name else name: t for name, t in tensors.items()}
    return named, metadata.get(HASH, "")


# Writing


def write_peft(
    folder: Path, layers: Mapping[str, Adapter], config: ModelConfig, family: str, base: str, sha256: str
) -> None:
    """Write adapters of a model of this config as a peft folder."""
    unique: dict[tuple[str, ...], Module] = {}
    for module in modules_of(config, family)[0].values():
        unique.setdefault(module.layers, module)  # the path in a model with a head comes first
    tensors: dict[str, Tensor] = {}
    ranks, alphas, done = {}, {}, set()
    for names, module in unique.items():
        held = [layers.get(name) for name in names]
        if not any(held):
            continue
        done |= set(names)
        whole = _joined(module, held)
        tensors[PREFIX + module.path + A], tensors[PREFIX + module.path + B] = whole.A, whole.B
        if whole.magnitude is not None:
            tensors[PREFIX + module.path + MAGNITUDE] = whole.magnitude
        ranks[module.path], alphas[module.path] = len(whole.A), _alpha(whole)
    if missing := sorted(set(layers) - done):
        raise WeightsError(f"adapters of {summarize(missing)} have no name in the Hugging Face family of this model.")
    rank, alpha = _most_common(ranks), _most_common(alphas)
    stabilised = any(adapter.stabilised for adapter in layers.values())
    conv = any(isinstance(module.move.transform, Conv1D) for module in unique.values())
    data = {
        "peft_type": "LORA",
        BASE: base,
        "task_type": None,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": {re.escape(path): value for path, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(path): value for path, value in alphas.items() if value != alpha},
        "use_rslora": stabilised,
        "use_dora": any(layer.magnitude is not None for layer in layers.values()),
        "fan_in_fan_out": conv,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"} | ({HASH: sha256} if sha256 else {}))


def _most_common(values: Mapping[str, Any]) -> Any:
    return max(set(values.values()), key=lambda one: (list(values.values()).count(one), one))


def _alpha(adapter: Adapter) -> float:
    """Return alpha, of which the scale is alpha / rank or alpha / sqrt(rank); whole where it is up to rounding."""
    rank = len(adapter.A)
    alpha = adapter.scale * (math.sqrt(rank) if adapter.stabilised else rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-15) else alpha


def _joined(module: Module, held: list[Adapter | None]) -> Adapter:
    """Return one adapter for a module that holds several layers, of which some may have none."""
    given = [adapter for adapter in held if adapter is not None]
    if len(held) == 1:
        return given[0]
    magnitudes = [adapter.magnitude for adapter in given if adapter.magnitude is not None]
    if magnitudes and len(magnitudes) < len(held):
        raise WeightsError(
            f"{module.path} needs DoRA adapters of all of {', '.join(module.layers)}: train them together, or use LoRA."
        )
    first, magnitude = given[0], module.join(magnitudes) if magnitudes else None
    shared = all(adapter.scale == first.scale and torch.equal(adapter.A, first.A) for adapter in given)
    if shared and len(given) == len(held):
        return Adapter(first.A, module.join([adapter.B for adapter in given]), first.scale, magnitude, first.stabilised)
    rank = sum(len(adapter.A) for adapter in given)
    rows, at = [], 0
    for adapter, shape in zip(held, module.move.parts, strict=True):
        block = first.B.new_zeros(shape[0], rank)
        if adapter is not None:
            own = len(adapter.A)
            ratio = adapter.scale / first.scale
            block[:, at : at + own] = adapter.B if ratio == 1 else adapter.B * ratio
            at += own
        rows.append(block)
    stacked = torch.cat([adapter.A for adapter in given])
    return Adapter(stacked, module.join(rows), first.scale, magnitude, first.stabilised)
